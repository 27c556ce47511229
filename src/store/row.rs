//! Reads rows of `onceward_record`, alike for every SQL database.
//!
//! Both databases name their columns alike; they differ in how they keep an instant, which [`Timestamp`] learns here.

use std::time::Duration;

use bytes::Bytes;
use sqlx::{
    Database, Decode, Postgres, Row, Sqlite, Type,
    error::BoxDynError,
    postgres::{PgTypeInfo, PgValueRef, types::Oid},
    sqlite::{SqliteTypeInfo, SqliteValueRef},
};

use tracing::warn;

use super::{StoreError, metadata};
use crate::{
    record::{
        EarlierTokens, Fingerprint, Invalid, Key, OnExpiry, Origin, Owner, Record, Status, StoredResult, Timestamp,
        Token,
    },
    write::Stamp,
};

/// A database whose values can be read as the types of a record.
pub(super) trait Columns: Database {
    /// Reads one column.
    fn get<T: Column>(row: &Self::Row, name: &'static str) -> Result<T, sqlx::Error>;
}

/// A type that every database knows.
pub(super) trait Column:
    for<'r> Decode<'r, Postgres> + Type<Postgres> + for<'r> Decode<'r, Sqlite> + Type<Sqlite>
{
}
impl<T> Column for T where T: for<'r> Decode<'r, Postgres> + Type<Postgres> + for<'r> Decode<'r, Sqlite> + Type<Sqlite> {}

impl Columns for Postgres {
    fn get<T: Column>(row: &Self::Row, name: &'static str) -> Result<T, sqlx::Error> {
        row.try_get(name)
    }
}

impl Columns for Sqlite {
    fn get<T: Column>(row: &Self::Row, name: &'static str) -> Result<T, sqlx::Error> {
        row.try_get(name)
    }
}

/// The record of `key` in this row, if the row is really that key's.
pub(super) fn record<D: Columns>(row: &D::Row, key: &Key) -> Result<Result<Record, StoreError>, sqlx::Error> {
    let text = |name| D::get::<String>(row, name);
    if text("namespace")? != key.namespace() || text("subject")? != key.subject() || text("value")? != key.value() {
        return Ok(Err(StoreError::KeyCollision));
    }
    let optional = |name| D::get::<Option<String>>(row, name);
    let bytes = |name| Ok::<_, sqlx::Error>(D::get::<Option<Vec<u8>>>(row, name)?.map(Bytes::from));
    let code: Option<i32> = D::get(row, "result_code")?;
    let result = match code {
        None => None,
        Some(code) => Some(StoredResult {
            code,
            metadata: metadata::decode(optional("result_metadata")?.as_deref())
                .map_err(|e| unreadable("result_metadata", e))?,
            body: bytes("result_body")?.unwrap_or_default(),
        }),
    };
    Ok(Ok(Record {
        key: key.clone(),
        token: valid("token", Token::new(&text("token")?))?,
        earlier_tokens: EarlierTokens::from_bytes(D::get(row, "earlier_tokens")?),
        fence: D::get(row, "fence")?,
        version: D::get(row, "version")?,
        attempt: D::get(row, "attempt")?,
        status: valid("status", Status::from_code(D::get(row, "status")?).ok_or(Invalid("is unknown")))?,
        resolved: D::get(row, "resolved")?,
        on_expiry: valid("on_expiry", OnExpiry::from_code(D::get(row, "on_expiry")?).ok_or(Invalid("is unknown")))?,
        owner: optional("owner")?.map(|text| valid("owner", Owner::new(&text))).transpose()?,
        fingerprint: optional("fingerprint")?.map(|text| valid("fingerprint", Fingerprint::new(&text))).transpose()?,
        origin: optional("origin")?.and_then(|text| Origin::parse(&text)),
        lock_ttl: duration::<D>(row, "lock_ttl")?,
        retention: duration::<D>(row, "retention")?,
        created_at: D::get(row, "created_at")?,
        locked_until: D::get(row, "locked_until")?,
        finished_at: D::get(row, "finished_at")?,
        expires_at: D::get(row, "expires_at")?,
        checkpoint: bytes("checkpoint")?,
        checkpoint_sequence: D::get(row, "checkpoint_sequence")?,
        result,
    }))
}

/// A record that cannot be read, such as one that somebody has edited by hand, fails for itself alone.
pub(super) fn readable(record: Result<Result<Record, StoreError>, sqlx::Error>) -> Result<Record, StoreError> {
    record.unwrap_or_else(|error| {
        warn!(%error, "a record cannot be read");
        Err(StoreError::Refused)
    })
}

/// What a statement that wrote returns for one record.
pub(super) fn stamp<D: Columns>(row: &D::Row) -> Result<Stamp, sqlx::Error> {
    Ok(Stamp {
        now: D::get(row, "now")?,
        fence: D::get(row, "fence")?,
        version: D::get(row, "version")?,
        lock_ttl: duration::<D>(row, "lock_ttl")?,
        locked_until: D::get(row, "locked_until")?,
        expires_at: D::get(row, "expires_at")?,
    })
}

fn duration<D: Columns>(row: &D::Row, name: &'static str) -> Result<Duration, sqlx::Error> {
    Ok(Duration::from_micros(D::get::<i64>(row, name)?.try_into().unwrap_or(0)))
}

fn valid<T>(column: &'static str, value: Result<T, Invalid>) -> Result<T, sqlx::Error> {
    value.map_err(|invalid| unreadable(column, invalid))
}

fn unreadable(column: &'static str, source: impl std::error::Error + Send + Sync + 'static) -> sqlx::Error {
    sqlx::Error::ColumnDecode { index: column.into(), source: Box::new(source) }
}

/// Microseconds from the epoch of Unix to that of Postgres, 2000-01-01.
const POSTGRES_EPOCH: i64 = 946_684_800_000_000;

impl Type<Postgres> for Timestamp {
    fn type_info() -> PgTypeInfo {
        // timestamptz
        PgTypeInfo::with_oid(Oid(1184))
    }
}

impl<'r> Decode<'r, Postgres> for Timestamp {
    fn decode(value: PgValueRef<'r>) -> Result<Self, BoxDynError> {
        // The binary form is a big-endian count of microseconds; our statements are all prepared, so it is always this one.
        let since: i64 = i64::from_be_bytes(value.as_bytes()?.try_into()?);
        Ok(Self(since.saturating_add(POSTGRES_EPOCH)))
    }
}

impl Type<Sqlite> for Timestamp {
    fn type_info() -> SqliteTypeInfo {
        <i64 as Type<Sqlite>>::type_info()
    }

    fn compatible(ty: &SqliteTypeInfo) -> bool {
        <i64 as Type<Sqlite>>::compatible(ty)
    }
}

impl<'r> Decode<'r, Sqlite> for Timestamp {
    fn decode(value: SqliteValueRef<'r>) -> Result<Self, BoxDynError> {
        <i64 as Decode<'r, Sqlite>>::decode(value).map(Self)
    }
}
