//! The deadline of a call, as its `grpc-timeout` header tells it.

use std::time::Duration;

/// The header that carries what is left of a call's deadline.
pub(super) const HEADER: &str = "grpc-timeout";

/// Reads the header: up to eight digits and a unit; `None` where it is malformed.
pub(super) fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

/// How long a call may be held so that its answer still arrives: the deadline less a tenth, at most 100 ms.
pub(super) fn patience(timeout: Duration) -> Duration {
    timeout.saturating_sub((timeout / 10).min(Duration::from_millis(100)))
}

/// When the server gives up on a call: a little before its caller and the transport do, so that the answer has our form.
pub(super) fn cutoff(timeout: Duration) -> Duration {
    timeout.saturating_sub((timeout / 20).min(Duration::from_millis(20)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_the_protocol_writes_them() {
        assert_eq!(parse("1H"), Some(Duration::from_secs(3600)));
        assert_eq!(parse("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(parse("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse("7n"), Some(Duration::from_nanos(7)));
        for malformed in ["", "S", "1", "1s", "-1S", "+1S", "123456789S", "1\u{e9}"] {
            assert_eq!(parse(malformed), None, "{malformed}");
        }
    }

    #[test]
    fn an_answer_leaves_before_the_deadline() {
        for millis in [1, 100, 1_000, 60_000] {
            let timeout = Duration::from_millis(millis);
            assert!(patience(timeout) < cutoff(timeout) && cutoff(timeout) < timeout);
        }
    }
}
