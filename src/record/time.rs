//! [`Timestamp`]: an instant of a store's clock.

use std::time::Duration;

/// Microseconds since 1970-01-01 00:00 UTC, the resolution of Postgres.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// This much later; the end of time if that is beyond it.
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(micros(duration)))
    }

    /// How long it is from `earlier` to this; zero if it is not earlier.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0).try_into().unwrap_or(0))
    }
}

/// A duration in whole microseconds, as stores keep it.
pub fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(Timestamp(1).after(Duration::MAX), Timestamp(i64::MAX));
        assert_eq!(Timestamp(5).since(Timestamp(7)), Duration::ZERO);
        assert_eq!(Timestamp(7).since(Timestamp(5)), Duration::from_micros(2));
        assert_eq!(Timestamp(i64::MAX).since(Timestamp(-5)), Duration::from_micros(i64::MAX as u64));
    }
}
