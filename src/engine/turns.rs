//! [`Turns`]: one at a time for those calls of a key, in this process, that got in each other's way.
//!
//! An optimistic write that loses is tried again, and makes others lose: of many copies of one call, each makes the others go
//! round. From the second round on they take turns instead. Keys share turns, since there is a fixed number of them; a turn
//! is a matter of fairness and never of correctness, which is the store's.

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::record::Key;

const COUNT: usize = 1024;

pub(super) struct Turns(Vec<Semaphore>);

impl Default for Turns {
    fn default() -> Self {
        Self((0..COUNT).map(|_| Semaphore::new(1)).collect())
    }
}

impl Turns {
    /// The turn of a key, if nobody else has it; given back on drop.
    pub(super) fn take_now(&self, key: &Key) -> Option<SemaphorePermit<'_>> {
        self.of(key).try_acquire().ok()
    }

    /// The turn of a key, once it comes; given back on drop.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it is not taken.
    pub(super) async fn take(&self, key: &Key) -> Option<SemaphorePermit<'_>> {
        self.of(key).acquire().await.ok()
    }

    #[expect(clippy::indexing_slicing, reason = "a remainder is below its divisor")]
    fn of(&self, key: &Key) -> &Semaphore {
        // Ids end in a hash, so their last bits spread well.
        &self.0[key.id().as_u128() as usize % COUNT]
    }
}
