//! [`Batch`]: writes of one kind as one statement over arrays.

use sqlx::{PgConnection, Row, postgres::PgArguments, query::Query};
use uuid::Uuid;

use crate::{
    record::{Key, Token, micros},
    store::{metadata, row},
    write::{Action, Condition, Stamp, Write},
};

/// The kinds of writes; each has its statement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Insert,
    Reserve,
    Extend,
    Finish,
}

impl Kind {
    /// Completions first: the effect of theirs has happened already.
    pub(super) const ALL: [Self; 4] = [Self::Finish, Self::Extend, Self::Reserve, Self::Insert];

    fn of(write: &Write) -> Self {
        match write.action {
            Action::Insert(_) => Self::Insert,
            Action::Reserve(..) => Self::Reserve,
            Action::Extend(..) => Self::Extend,
            Action::Finish(..) => Self::Finish,
        }
    }
}

/// Writes of one kind, in the order of their ids: sessions that lock rows in one order cannot deadlock.
#[derive(Clone, Debug)]
pub(super) struct Batch {
    kind: Kind,
    writes: Vec<Write>,
}

impl Batch {
    /// One write.
    pub(super) fn single(write: Write) -> Self {
        Self { kind: Kind::of(&write), writes: vec![write] }
    }

    /// The writes of this kind, and their places.
    pub(super) fn of<'w>(kind: Kind, writes: impl Iterator<Item = (usize, &'w Write)>) -> (Vec<usize>, Self) {
        let mut chosen: Vec<_> = writes.filter(|(_, write)| Kind::of(write) == kind).collect();
        chosen.sort_by_key(|(_, write)| write.key.id());
        let (places, writes) = chosen.into_iter().map(|(place, write)| (place, write.clone())).unzip();
        (places, Self { kind, writes })
    }

    pub(super) fn len(&self) -> usize {
        self.writes.len()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = Uuid> {
        self.writes.iter().map(|write| write.key.id())
    }

    pub(super) fn is_reservation(&self) -> bool {
        self.writes.iter().all(Write::is_reservation)
    }

    /// The same writes, each as a batch of its own.
    pub(super) fn split(self) -> impl Iterator<Item = Self> {
        self.writes.into_iter().map(move |write| Self { kind: self.kind, writes: vec![write] })
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

    fn query(&self) -> Query<'_, sqlx::Postgres, PgArguments> {
        match self.kind {
            Kind::Insert => self.insert(),
            Kind::Reserve => self.reserve(),
            Kind::Extend => self.extend(),
            Kind::Finish => self.finish(),
        }
    }

    fn insert(&self) -> Query<'_, sqlx::Postgres, PgArguments> {
        let reservations = || {
            self.writes.iter().filter_map(|write| match &write.action {
                Action::Insert(reservation) => Some(reservation),
                _ => None,
            })
        };
        self.keys(include_str!("insert.sql"))
            .bind(column(reservations(), |r| r.token.as_str()))
            .bind(column(reservations(), |r| r.on_expiry.code()))
            .bind(column(reservations(), |r| r.owner.as_ref().map(|owner| owner.as_str())))
            .bind(column(reservations(), |r| r.fingerprint.as_ref().map(|fingerprint| fingerprint.as_str())))
            .bind(column(reservations(), |r| r.origin.as_ref().map(|origin| origin.as_str())))
            .bind(column(reservations(), |r| micros(r.lock_ttl)))
            .bind(column(reservations(), |r| micros(r.retention)))
    }

    fn reserve(&self) -> Query<'_, sqlx::Postgres, PgArguments> {
        let reservations = || {
            self.writes.iter().filter_map(|write| match &write.action {
                Action::Reserve(_, next) => Some(next),
                _ => None,
            })
        };
        self.conditions(include_str!("reserve.sql"))
            .bind(column(reservations(), |r| r.reservation.token.as_str()))
            .bind(column(reservations(), |r| r.reservation.on_expiry.code()))
            .bind(column(reservations(), |r| r.reservation.owner.as_ref().map(|owner| owner.as_str())))
            .bind(column(reservations(), |r| {
                r.reservation.fingerprint.as_ref().map(|fingerprint| fingerprint.as_str())
            }))
            .bind(column(reservations(), |r| r.reservation.origin.as_ref().map(|origin| origin.as_str())))
            .bind(column(reservations(), |r| micros(r.reservation.lock_ttl)))
            .bind(column(reservations(), |r| micros(r.reservation.retention)))
            .bind(column(reservations(), |r| r.attempt))
            .bind(column(reservations(), |r| r.earlier_tokens.as_bytes()))
    }

    fn extend(&self) -> Query<'_, sqlx::Postgres, PgArguments> {
        let extensions = || {
            self.writes.iter().filter_map(|write| match &write.action {
                Action::Extend(_, extension) => Some(extension),
                _ => None,
            })
        };
        self.conditions(include_str!("extend.sql"))
            .bind(column(extensions(), |e| e.lock_ttl.map(micros)))
            .bind(column(extensions(), |e| e.on_expiry.code()))
            .bind(column(extensions(), |e| e.checkpoint.as_ref().map(|checkpoint| checkpoint.bytes.as_ref())))
            .bind(column(extensions(), |e| e.checkpoint.as_ref().and_then(|checkpoint| checkpoint.sequence)))
    }

    fn finish(&self) -> Query<'_, sqlx::Postgres, PgArguments> {
        let finishes = || {
            self.writes.iter().filter_map(|write| match &write.action {
                Action::Finish(_, finish) => Some(finish),
                _ => None,
            })
        };
        self.conditions(include_str!("finish.sql"))
            .bind(column(finishes(), |f| f.status.code()))
            .bind(column(finishes(), |f| f.resolved))
            .bind(column(finishes(), |f| f.retention.map(micros)))
            .bind(column(finishes(), |f| f.checkpoint.as_deref()))
            .bind(column(finishes(), |f| f.result.as_ref().map(|result| result.code)))
            .bind(column(finishes(), |f| f.result.as_ref().and_then(|result| metadata::encode(&result.metadata))))
            .bind(column(finishes(), |f| f.result.as_ref().map(|result| result.body.as_ref())))
    }

    /// A statement with what every write has: its key.
    fn keys(&self, sql: &'static str) -> Query<'_, sqlx::Postgres, PgArguments> {
        let keys = || self.writes.iter().map(|write| &write.key);
        sqlx::query(sql)
            .bind(column(keys(), Key::id))
            .bind(column(keys(), Key::namespace))
            .bind(column(keys(), Key::subject))
            .bind(column(keys(), Key::value))
    }

    /// A statement with what every change has: its key and its condition.
    fn conditions(&self, sql: &'static str) -> Query<'_, sqlx::Postgres, PgArguments> {
        let conditions = || {
            self.writes.iter().filter_map(|write| match &write.action {
                Action::Insert(_) => None,
                Action::Reserve(condition, _) | Action::Extend(condition, _) | Action::Finish(condition, _) => {
                    Some(condition)
                }
            })
        };
        self.keys(sql)
            .bind(column(conditions(), |condition| condition.holder().map(Token::as_str)))
            .bind(column(conditions(), Condition::seen))
    }
}

fn column<'a, T: 'a, V>(items: impl Iterator<Item = &'a T>, value: impl Fn(&'a T) -> V) -> Vec<V> {
    items.map(value).collect()
}
