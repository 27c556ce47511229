//! [`Batch`]: writes as one statement over arrays, and one commit.

use std::{collections::HashSet, sync::LazyLock};

use sqlx::{PgConnection, Row, postgres::PgArguments};
use uuid::Uuid;

use crate::{
    record::{Key, Token, micros},
    store::{metadata, row},
    write::{Action, Condition, Extension, Finish, NextReservation, Reservation, Stamp, Write},
};

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, PgArguments>;

const INSERT: &str = include_str!("insert.sql");
const INSERT_ONE: &str = include_str!("insert_one.sql");
const RESERVE: &str = include_str!("reserve.sql");
const EXTEND: &str = include_str!("extend.sql");
const FINISH: &str = include_str!("finish.sql");
const FINISH_ONE: &str = include_str!("finish_one.sql");
/// Fresh reservations and completions, which is what a busy service does all day, as one statement. The inserts come first:
/// in this order sessions cannot deadlock, since nobody can wait for a row that is not yet committed but another insert.
static INSERT_AND_FINISH: LazyLock<String> = LazyLock::new(|| {
    let finish = renumbered(FINISH, parameters(INSERT));
    include_str!("insert_and_finish.sql").replace("{insert}", INSERT).replace("{finish}", &finish)
});

/// What one statement can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Statement {
    Insert,
    InsertOne,
    Reserve,
    Extend,
    Finish,
    FinishOne,
    InsertAndFinish,
}

impl Statement {
    /// The statement for one write.
    fn of(write: &Write) -> Self {
        match write.action {
            Action::Insert(_) => Self::InsertOne,
            Action::Reserve(..) => Self::Reserve,
            Action::Extend(..) => Self::Extend,
            Action::Finish(..) => Self::FinishOne,
        }
    }

    /// The statements that these writes take, each kind in one of them.
    fn needed(writes: &[(usize, Write)]) -> Vec<Self> {
        let has = |statement: Self| writes.iter().any(|(_, write)| statement.does(write));
        let mut needed = match (has(Self::Insert), has(Self::Finish)) {
            (true, true) => vec![Self::InsertAndFinish],
            (true, false) => vec![Self::Insert],
            (false, true) => vec![Self::Finish],
            (false, false) => vec![],
        };
        needed.extend([Self::Reserve, Self::Extend].into_iter().filter(|statement| has(*statement)));
        needed
    }

    fn does(self, write: &Write) -> bool {
        match write.action {
            Action::Insert(_) => matches!(self, Self::Insert | Self::InsertOne | Self::InsertAndFinish),
            Action::Reserve(..) => self == Self::Reserve,
            Action::Extend(..) => self == Self::Extend,
            Action::Finish(..) => matches!(self, Self::Finish | Self::FinishOne | Self::InsertAndFinish),
        }
    }

    fn sql(self) -> &'static str {
        match self {
            Self::Insert => INSERT,
            Self::InsertOne => INSERT_ONE,
            Self::Reserve => RESERVE,
            Self::Extend => EXTEND,
            Self::Finish => FINISH,
            Self::FinishOne => FINISH_ONE,
            Self::InsertAndFinish => INSERT_AND_FINISH.as_str(),
        }
    }
}

/// Writes of one statement, in the order of their ids: sessions that lock rows in one order cannot deadlock.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    statement: Statement,
    writes: Vec<Write>,
}

impl Batch {
    /// All of these writes, as few batches as can be, and for each of these the places of its writes.
    pub(super) fn all(mut writes: Vec<(usize, Write)>) -> Vec<(Vec<usize>, Self)> {
        writes.sort_unstable_by_key(|(_, write)| write.key.id());
        let needed = Statement::needed(&writes).into_iter();
        let batch = |statement: Statement| {
            let (places, writes): (_, Vec<Write>) = writes.extract_if(.., |(_, write)| statement.does(write)).unzip();
            let statement = if let [write] = &writes[..] { Statement::of(write) } else { statement };
            (places, Self { statement, writes })
        };
        needed.map(batch).collect()
    }

    /// One write.
    pub(super) fn single(write: Write) -> Self {
        Self { statement: Statement::of(&write), writes: vec![write] }
    }

    pub(super) fn len(&self) -> usize {
        self.writes.len()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = Uuid> {
        self.writes.iter().map(|write| write.key.id())
    }

    pub(super) fn writes(&self) -> &[Write] {
        &self.writes
    }

    /// The writes of other ids than these.
    pub(super) fn without(mut self, ids: &HashSet<Uuid>) -> Self {
        self.writes.retain(|write| !ids.contains(&write.key.id()));
        self
    }

    /// Runs the statement, and tells for each write whether it took.
    pub(super) async fn run(&self, connection: &mut PgConnection) -> Result<Vec<Option<Stamp>>, sqlx::Error> {
        let mut stamps = vec![None; self.writes.len()];
        for row in self.query().fetch_all(connection).await? {
            let id: Uuid = row.try_get("id")?;
            let place = self.writes.binary_search_by_key(&id, |write| write.key.id());
            if let Some(stamp) = place.ok().and_then(|place| stamps.get_mut(place)) {
                *stamp = Some(row::stamp::<sqlx::Postgres>(&row)?);
            }
        }
        Ok(stamps)
    }

    fn query(&self) -> Query<'_> {
        let query = sqlx::query(self.statement.sql());
        match self.statement {
            Statement::Insert => self.bind_inserts(query),
            Statement::InsertOne => self.bind_insert(query),
            Statement::Reserve => self.bind_reserves(query),
            Statement::Extend => self.bind_extends(query),
            Statement::Finish => self.bind_finishes(query),
            Statement::FinishOne => self.bind_finish(query),
            Statement::InsertAndFinish => self.bind_finishes(self.bind_inserts(query)),
        }
    }

    fn bind_insert<'q>(&'q self, query: Query<'q>) -> Query<'q> {
        self.writes.iter().fold(query, |query, write| match &write.action {
            Action::Insert(reservation) => bind_key(query, &write.key)
                .bind(reservation.token.as_str())
                .bind(reservation.on_expiry.code())
                .bind(reservation.owner.as_ref().map(|owner| owner.as_str()))
                .bind(reservation.fingerprint.as_ref().map(|fingerprint| fingerprint.as_str()))
                .bind(reservation.origin.as_ref().map(|origin| origin.as_str()))
                .bind(micros(reservation.lock_ttl))
                .bind(micros(reservation.retention)),
            _ => query,
        })
    }

    fn bind_finish<'q>(&'q self, query: Query<'q>) -> Query<'q> {
        self.writes.iter().fold(query, |query, write| match &write.action {
            Action::Finish(condition, finish) => bind_key(query, &write.key)
                .bind(condition.holder().map(Token::as_str))
                .bind(condition.seen())
                .bind(finish.status.code())
                .bind(finish.resolved)
                .bind(finish.retention.map(micros))
                .bind(finish.checkpoint.as_deref())
                .bind(finish.result.as_ref().map(|result| result.code))
                .bind(finish.result.as_ref().and_then(|result| metadata::encode(&result.metadata)))
                .bind(finish.result.as_ref().map(|result| result.body.as_ref())),
            _ => query,
        })
    }

    fn bind_inserts<'q>(&'q self, query: Query<'q>) -> Query<'q> {
        let inserts: Vec<(&Key, &Reservation)> = self.chosen(|write| match &write.action {
            Action::Insert(reservation) => Some((&write.key, reservation)),
            _ => None,
        });
        bind_keys(query, inserts.iter().map(|(key, _)| *key))
            .bind(column(&inserts, |(_, r)| r.token.as_str()))
            .bind(column(&inserts, |(_, r)| r.on_expiry.code()))
            .bind(column(&inserts, |(_, r)| r.owner.as_ref().map(|owner| owner.as_str())))
            .bind(column(&inserts, |(_, r)| r.fingerprint.as_ref().map(|fingerprint| fingerprint.as_str())))
            .bind(column(&inserts, |(_, r)| r.origin.as_ref().map(|origin| origin.as_str())))
            .bind(column(&inserts, |(_, r)| micros(r.lock_ttl)))
            .bind(column(&inserts, |(_, r)| micros(r.retention)))
    }

    fn bind_reserves<'q>(&'q self, query: Query<'q>) -> Query<'q> {
        let reserves: Vec<Change<'_, NextReservation>> = self.chosen(|write| match &write.action {
            Action::Reserve(condition, next) => Some((&write.key, condition, next)),
            _ => None,
        });
        bind_conditions(query, &reserves)
            .bind(column(&reserves, |(.., next)| next.reservation.token.as_str()))
            .bind(column(&reserves, |(.., next)| next.reservation.on_expiry.code()))
            .bind(column(&reserves, |(.., next)| next.reservation.owner.as_ref().map(|owner| owner.as_str())))
            .bind(column(&reserves, |(.., next)| {
                next.reservation.fingerprint.as_ref().map(|fingerprint| fingerprint.as_str())
            }))
            .bind(column(&reserves, |(.., next)| next.reservation.origin.as_ref().map(|origin| origin.as_str())))
            .bind(column(&reserves, |(.., next)| micros(next.reservation.lock_ttl)))
            .bind(column(&reserves, |(.., next)| micros(next.reservation.retention)))
            .bind(column(&reserves, |(.., next)| next.attempt))
            .bind(column(&reserves, |(.., next)| next.earlier_tokens.as_bytes()))
    }

    fn bind_extends<'q>(&'q self, query: Query<'q>) -> Query<'q> {
        let extends: Vec<Change<'_, Extension>> = self.chosen(|write| match &write.action {
            Action::Extend(condition, extension) => Some((&write.key, condition, extension)),
            _ => None,
        });
        bind_conditions(query, &extends)
            .bind(column(&extends, |(.., e)| e.lock_ttl.map(micros)))
            .bind(column(&extends, |(.., e)| e.on_expiry.code()))
            .bind(column(&extends, |(.., e)| e.checkpoint.as_ref().map(|checkpoint| checkpoint.bytes.as_ref())))
            .bind(column(&extends, |(.., e)| e.checkpoint.as_ref().and_then(|checkpoint| checkpoint.sequence)))
    }

    fn bind_finishes<'q>(&'q self, query: Query<'q>) -> Query<'q> {
        let finishes: Vec<Change<'_, Finish>> = self.chosen(|write| match &write.action {
            Action::Finish(condition, finish) => Some((&write.key, condition, finish)),
            _ => None,
        });
        bind_conditions(query, &finishes)
            .bind(column(&finishes, |(.., f)| f.status.code()))
            .bind(column(&finishes, |(.., f)| f.resolved))
            .bind(column(&finishes, |(.., f)| f.retention.map(micros)))
            .bind(column(&finishes, |(.., f)| f.checkpoint.as_deref()))
            .bind(column(&finishes, |(.., f)| f.result.as_ref().map(|result| result.code)))
            .bind(column(&finishes, |(.., f)| f.result.as_ref().and_then(|result| metadata::encode(&result.metadata))))
            .bind(column(&finishes, |(.., f)| f.result.as_ref().map(|result| result.body.as_ref())))
    }

    fn chosen<'w, T>(&'w self, choose: impl FnMut(&'w Write) -> Option<T>) -> Vec<T> {
        self.writes.iter().filter_map(choose).collect()
    }
}

/// A write to a record that exists.
type Change<'w, A> = (&'w Key, &'w Condition, &'w A);

/// What one write has.
fn bind_key<'q>(query: Query<'q>, key: &'q Key) -> Query<'q> {
    query.bind(key.id()).bind(key.namespace()).bind(key.subject()).bind(key.value())
}

/// What every write has.
fn bind_keys<'q>(query: Query<'q>, keys: impl Iterator<Item = &'q Key> + Clone) -> Query<'q> {
    query
        .bind(keys.clone().map(Key::id).collect::<Vec<_>>())
        .bind(keys.clone().map(Key::namespace).collect::<Vec<_>>())
        .bind(keys.clone().map(Key::subject).collect::<Vec<_>>())
        .bind(keys.map(Key::value).collect::<Vec<_>>())
}

/// What every change has.
fn bind_conditions<'q, A>(query: Query<'q>, changes: &[Change<'q, A>]) -> Query<'q> {
    bind_keys(query, changes.iter().map(|(key, ..)| *key))
        .bind(column(changes, |(_, condition, _)| condition.holder().map(Token::as_str)))
        .bind(column(changes, |(_, condition, _)| condition.seen()))
}

fn column<T, V>(items: &[T], value: impl Fn(&T) -> V) -> Vec<V> {
    items.iter().map(value).collect()
}

/// Every statement, with its name.
#[cfg(test)]
pub(super) fn statements() -> Vec<(&'static str, &'static str)> {
    vec![
        ("insert", INSERT),
        ("insert_one", INSERT_ONE),
        ("reserve", RESERVE),
        ("extend", EXTEND),
        ("finish", FINISH),
        ("finish_one", FINISH_ONE),
        ("insert_and_finish", INSERT_AND_FINISH.as_str()),
    ]
}

/// How many parameters a statement has.
pub(super) fn parameters(sql: &str) -> usize {
    sql.split('$').skip(1).filter_map(|rest| number(rest).0.parse().ok()).max().unwrap_or(0)
}

/// The statement with its parameters behind `count` others.
fn renumbered(sql: &str, count: usize) -> String {
    let mut parts = sql.split('$');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (digits, rest) = number(part);
        text.push_str(&format!("${}{rest}", digits.parse::<usize>().unwrap_or(0) + count));
    }
    text
}

fn number(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_are_joined_behind_each_others_parameters() {
        assert_eq!(parameters("SELECT $1::text, $12, $3"), 12);
        assert_eq!(renumbered("SELECT $1::text, f($12), $3", 4), "SELECT $5::text, f($16), $7");
        assert_eq!(parameters(INSERT_AND_FINISH.as_str()), parameters(INSERT) + parameters(FINISH));
        assert!(!INSERT_AND_FINISH.contains(['{', '}']));
    }
}
