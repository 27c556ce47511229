//! [`LockedRows`]: rows that somebody else was just seen to hold.
//!
//! A statement that meets a locked row occupies its connection for a whole lock timeout. If every caller of such a key
//! tried, a handful of keys would occupy all connections. So a key that was met locked is remembered for a while, and
//! meanwhile one caller at a time may try it, on connections apart; the others are told at once.

use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

/// How long a row is believed to be locked after it was met so.
const MEMORY: Duration = Duration::from_secs(1);
/// How many are remembered. Beyond it, callers simply find out by themselves.
const COUNT_MAX: usize = 10_000;

/// Rows that somebody else was just seen to hold.
#[derive(Default)]
pub(super) struct LockedRows(Mutex<HashMap<Uuid, Row>>);

struct Row {
    seen: Instant,
    /// Somebody tries it now.
    tried: bool,
}

/// How a caller is to go on with a row.
pub(super) enum Access<'a> {
    /// Like everybody.
    Free,
    /// On a connection apart, while this is held.
    Turn(Turn<'a>),
    /// Not now.
    Taken,
}

impl LockedRows {
    /// How to go on with this row.
    pub(super) fn access(&self, id: Uuid) -> Access<'_> {
        let mut rows = self.rows();
        match rows.get_mut(&id) {
            None => Access::Free,
            Some(row) if row.tried => Access::Taken,
            Some(row) if row.seen.elapsed() > MEMORY => {
                rows.remove(&id);
                Access::Free
            }
            Some(row) => {
                row.tried = true;
                Access::Turn(Turn { rows: self, id })
            }
        }
    }

    /// Whether this row was just met locked.
    pub(super) fn contains(&self, id: Uuid) -> bool {
        self.rows().get(&id).is_some_and(|row| row.seen.elapsed() <= MEMORY)
    }

    /// This row was met locked.
    pub(super) fn note(&self, id: Uuid) {
        let mut rows = self.rows();
        if rows.len() >= COUNT_MAX {
            rows.retain(|_, row| row.tried || row.seen.elapsed() <= MEMORY);
        }
        let full = rows.len() >= COUNT_MAX;
        match rows.entry(id) {
            Entry::Occupied(mut row) => row.get_mut().seen = Instant::now(),
            Entry::Vacant(_) if full => {}
            Entry::Vacant(place) => drop(place.insert(Row { seen: Instant::now(), tried: false })),
        }
    }

    fn rows(&self) -> MutexGuard<'_, HashMap<Uuid, Row>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which of these rows another session holds now. It takes one lock timeout for each of them, so it belongs on a connection
/// with a short one.
pub(super) async fn find(connection: &mut PgConnection, ids: &[Uuid]) -> Result<HashSet<Uuid>, sqlx::Error> {
    let list: Vec<String> = ids.iter().map(Uuid::to_string).collect();
    let sql = include_str!("locked.sql").replace("{ids}", &format!("{{{}}}", list.join(",")));
    // Ids are hexadecimal digits, and a block of code takes no parameters.
    let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await?;
    let locked =
        rows.iter().map(|row| sqlx::Row::try_get::<String, _>(row, "locked")).collect::<Result<String, _>>()?;
    Ok(locked.split(',').filter_map(|id| id.parse().ok()).collect())
}

/// The turn to try a row, given back on drop.
pub(super) struct Turn<'a> {
    rows: &'a LockedRows,
    id: Uuid,
}

impl Turn<'_> {
    /// The row is not locked any more.
    pub(super) fn free(self) {
        self.rows.rows().remove(&self.id);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(row) = self.rows.rows().get_mut(&self.id) {
            row.tried = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_callers_of_a_locked_row_one_at_a_time_tries() {
        let (rows, id) = (LockedRows::default(), Uuid::from_u128(1));
        assert!(matches!(rows.access(id), Access::Free));
        rows.note(id);
        let Access::Turn(turn) = rows.access(id) else { panic!("the first has the turn") };
        assert!(matches!(rows.access(id), Access::Taken));
        assert!(matches!(rows.access(Uuid::from_u128(2)), Access::Free));
        drop(turn);
        let Access::Turn(turn) = rows.access(id) else { panic!("the next has the turn") };
        turn.free();
        assert!(matches!(rows.access(id), Access::Free));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let rows = LockedRows::default();
        (0..COUNT_MAX as u128 + 10).for_each(|n| rows.note(Uuid::from_u128(n)));
        assert_eq!(rows.rows().len(), COUNT_MAX);
    }
}
