//! [`Check`]: reads the fields of one request, and collects what is wrong with them.

use std::time::Duration;

use bytes::Bytes;
use tonic_types::FieldViolation;

use crate::{
    grpc::status::CallError,
    proto,
    record::{
        BODY_BYTES_MAX, CHECKPOINT_BYTES_MAX, Invalid, Key, METADATA_BYTES_MAX, METADATA_PAIRS_MAX, OnExpiry,
        StoredResult,
    },
};

/// The range of a duration, and what an unset one means.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The shortest allowed.
    pub min: Duration,
    /// What an unset field means.
    pub default: Duration,
    /// The longest allowed.
    pub max: Duration,
}

/// What is wrong with a request, so far.
#[derive(Default)]
pub(super) struct Check(Vec<FieldViolation>);

impl Check {
    pub(super) fn violation(&mut self, field: &str, description: impl Into<String>) {
        self.0.push(FieldViolation::new(field, description));
    }

    /// The checked request, if nothing was wrong with it.
    pub(super) fn finish<A, B, T>(
        self,
        a: Option<A>,
        b: Option<B>,
        build: impl FnOnce(A, B) -> T,
    ) -> Result<T, CallError> {
        match (a, b) {
            (Some(a), Some(b)) if self.0.is_empty() => Ok(build(a, b)),
            _ => Err(self.into_error()),
        }
    }

    pub(super) fn into_error(self) -> CallError {
        CallError::Invalid(self.0)
    }

    pub(super) fn field<T>(&mut self, field: &str, value: Result<T, Invalid>) -> Option<T> {
        value.map_err(|invalid| self.violation(field, invalid.0)).ok()
    }

    pub(super) fn optional<T>(
        &mut self,
        field: &str,
        value: Option<String>,
        read: impl FnOnce(&str) -> Result<T, Invalid>,
    ) -> Option<T> {
        self.field(field, read(&value?))
    }

    pub(super) fn key(&mut self, key: Option<proto::Key>) -> Option<Key> {
        let Some(proto::Key { namespace, subject, value }) = key else {
            self.violation("key", "must be set");
            return None;
        };
        let key = Key::new(&namespace, &subject, &value);
        key.map_err(|faults| {
            faults.into_iter().for_each(|(field, fault)| self.violation(&format!("key.{field}"), fault.0))
        })
        .ok()
    }

    /// A duration in its range; `None` if it is unset or wrong.
    pub(super) fn duration(
        &mut self,
        field: &str,
        duration: Option<prost_types::Duration>,
        min: Duration,
        max: Duration,
    ) -> Option<Duration> {
        match read_duration(duration?) {
            Some(duration) if (min..=max).contains(&duration) => Some(duration),
            Some(_) => {
                self.violation(field, format!("must be from {} to {}", shown(min), shown(max)));
                None
            }
            None => {
                self.violation(field, "must be a well-formed duration that is not negative");
                None
            }
        }
    }

    pub(super) fn on_expiry(&mut self, field: &str, on_expiry: Option<i32>) -> OnExpiry {
        match on_expiry.map(proto::OnExpiry::try_from) {
            None | Some(Ok(proto::OnExpiry::Unspecified | proto::OnExpiry::Retry)) => OnExpiry::Retry,
            Some(Ok(proto::OnExpiry::Hold)) => OnExpiry::Hold,
            Some(Err(_)) => {
                self.violation(field, "must be ON_EXPIRY_RETRY or ON_EXPIRY_HOLD");
                OnExpiry::Retry
            }
        }
    }

    pub(super) fn checkpoint(&mut self, field: &str, checkpoint: Option<Bytes>) -> Option<Bytes> {
        let checkpoint = checkpoint?;
        if checkpoint.len() > CHECKPOINT_BYTES_MAX {
            self.violation(field, "must have at most 16 KiB");
            return None;
        }
        Some(checkpoint)
    }

    /// A result; an unset one is empty.
    pub(super) fn result(&mut self, field: &str, result: Option<proto::Result>) -> StoredResult {
        let proto::Result { code, metadata, body } = result.unwrap_or_default();
        let metadata_bytes: usize = metadata.iter().map(|pair| pair.name.len() + pair.value.len()).sum();
        if metadata.len() > METADATA_PAIRS_MAX {
            self.violation(&format!("{field}.metadata"), "must have at most 64 pairs");
        }
        if metadata_bytes > METADATA_BYTES_MAX {
            self.violation(&format!("{field}.metadata"), "must have at most 16 KiB in all");
        }
        if body.len() > BODY_BYTES_MAX {
            self.violation(&format!("{field}.body"), "must have at most 1 MiB");
        }
        let metadata = metadata.into_iter().map(|pair| (pair.name, pair.value)).collect();
        StoredResult { code, metadata, body }
    }
}

/// Reads a duration; `None` where it is negative or not well-formed, as `google/protobuf/duration.proto` has it.
fn read_duration(duration: prost_types::Duration) -> Option<Duration> {
    const SECONDS_MAX: u64 = 315_576_000_000;
    let seconds = u64::try_from(duration.seconds).ok().filter(|seconds| *seconds <= SECONDS_MAX)?;
    let nanos = u32::try_from(duration.nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    Some(Duration::new(seconds, nanos))
}

/// A duration as people write it, in the largest unit that divides it.
fn shown(duration: Duration) -> String {
    let micros = duration.as_micros();
    let units = [(86_400_000_000, "d"), (3_600_000_000, "h"), (60_000_000, "m"), (1_000_000, "s"), (1000, "ms")];
    match units.into_iter().find(|(unit, _)| micros > 0 && micros.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("{}{name}", micros / unit),
        None => format!("{micros}us"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_shown_as_people_write_them() {
        let seconds = [(90 * 86_400, "90d"), (86_400, "1d"), (5400, "90m"), (1, "1s")];
        assert!(seconds.into_iter().all(|(seconds, text)| shown(Duration::from_secs(seconds)) == text));
        assert_eq!(shown(Duration::from_millis(100)), "100ms");
        assert_eq!(shown(Duration::from_micros(1)), "1us");
    }

    #[test]
    fn durations_are_read_exactly_or_refused() {
        let read = |seconds, nanos| read_duration(prost_types::Duration { seconds, nanos });
        assert_eq!(read(1, 500_000_000), Some(Duration::from_millis(1500)));
        assert_eq!(read(0, 0), Some(Duration::ZERO));
        assert_eq!(read(315_576_000_000, 0), Some(Duration::from_secs(315_576_000_000)));
        for (seconds, nanos) in
            [(-1, 0), (1, -1), (0, 2_000_000_000), (0, 1_000_000_000), (i64::MIN, 0), (i64::MAX, 0), (0, i32::MIN)]
        {
            assert_eq!(read(seconds, nanos), None, "{seconds} s {nanos} ns");
        }
    }
}
