//! [`Turns`]: one at a time for those calls of a key, in this process, that got in each other's way.
//!
//! An optimistic write that loses is tried again, and makes others lose: of many copies of one call, each makes the others go
//! round. From the second round on they take turns instead. Keys share turns, since there is a fixed number of them; a turn
//! is a matter of fairness and never of correctness, which is the store's.

use std::time::Duration;

use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::timeout,
};

use crate::{
    record::Key,
    store::{StoreError, Urgency},
};

const COUNT: usize = 1024;
/// How long a call waits for its turn. Nothing was done for it.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Completions have turns of their own: none of them waits for a reservation.
pub(super) struct Turns {
    reservations: Vec<Semaphore>,
    completions: Vec<Semaphore>,
}

impl Default for Turns {
    fn default() -> Self {
        let turns = || (0..COUNT).map(|_| Semaphore::new(1)).collect();
        Self { reservations: turns(), completions: turns() }
    }
}

impl Turns {
    /// The turn of a key, if nobody else has it; given back on drop.
    pub(super) fn take_now(&self, urgency: Urgency, key: &Key) -> Option<SemaphorePermit<'_>> {
        self.of(urgency, key).try_acquire().ok()
    }

    /// The turn of a key, once it comes; given back on drop.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it is not taken.
    pub(super) async fn take(&self, urgency: Urgency, key: &Key) -> Result<SemaphorePermit<'_>, StoreError> {
        let late = match urgency {
            Urgency::Reservation => StoreError::Overloaded,
            Urgency::Completion => StoreError::Unavailable,
        };
        match timeout(TIMEOUT, self.of(urgency, key).acquire()).await {
            Ok(turn) => turn.map_err(|_| late),
            Err(_) => Err(late),
        }
    }

    #[expect(clippy::indexing_slicing, reason = "a remainder is below its divisor")]
    fn of(&self, urgency: Urgency, key: &Key) -> &Semaphore {
        let turns = match urgency {
            Urgency::Reservation => &self.reservations,
            Urgency::Completion => &self.completions,
        };
        // Ids end in a hash, so their last bits spread well.
        &turns[key.id().as_u128() as usize % COUNT]
    }
}
