//! [`Key`]: what names one operation.

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::{fingerprint::framed, proto};

/// Names one operation: the same key is the same operation, however often it is tried.
///
/// The three texts are compared byte for byte. The service refuses what is too long or has control characters.
///
/// ```
/// use onceward_client::Key;
///
/// // What the caller of your own service sent, on behalf of the user who sent it.
/// let key = Key::new("payments.charge", "order-17").subject("ann");
/// // A message that is delivered more than once: its content says which one it is.
/// let key = Key::of_content("mails.welcome", ["ann@example.com", "2026-12-01"]);
/// assert!(key.value().starts_with("content-sha256-v1:"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    namespace: String,
    subject: String,
    value: String,
}

impl Key {
    /// The key of this value, in the namespace of the operation, such as `payments.charge`.
    pub fn new(namespace: impl Into<String>, value: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), subject: String::new(), value: value.into() }
    }

    /// A key that nobody had before: a UUIDv7, whose order by time is what databases like. Make it where the operation is
    /// first wanted, and keep it for every retry.
    pub fn random(namespace: impl Into<String>) -> Self {
        Self::new(namespace, Uuid::now_v7())
    }

    /// The key of this content: the same parts, in the same order, are the same key. How they are cut counts too: `["a",
    /// "bc"]` is not `["ab", "c"]`.
    ///
    /// The value names the way in which it was made, which never changes: `content-sha256-v1:` and a hash.
    pub fn of_content<P: AsRef<[u8]>>(namespace: impl Into<String>, parts: impl IntoIterator<Item = P>) -> Self {
        let hash = parts.into_iter().fold(Sha256::new(), |hash, part| framed(hash, part.as_ref()));
        Self::new(namespace, format!("content-sha256-v1:{}", crate::fingerprint::hex(&hash.finalize())))
    }

    /// The same key on behalf of a user or tenant. It keeps one user's key from meeting another's.
    #[must_use]
    pub fn subject(self, subject: impl Into<String>) -> Self {
        Self { subject: subject.into(), ..self }
    }

    /// The service and operation that own the key.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// On whose behalf, or empty.
    pub fn subject_text(&self) -> &str {
        &self.subject
    }

    /// What the caller sent.
    pub fn value(&self) -> &str {
        &self.value
    }
}

impl From<Key> for proto::Key {
    fn from(Key { namespace, subject, value }: Key) -> Self {
        Self { namespace, subject, value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_key_is_the_same_for_ever() {
        assert_eq!(
            Key::of_content("n", ["a", "bc"]).value(),
            "content-sha256-v1:3fafa1cf2f19a7c1129beb20cf0983f73a489a221fc0dd2f16d1be292d089205"
        );
        assert_eq!(Key::of_content("n", ["a", "bc"]), Key::of_content("n", [&b"a"[..], b"bc"]));
    }

    #[test]
    fn a_content_key_knows_where_its_parts_end() {
        let keys = [vec!["a", "bc"], vec!["ab", "c"], vec!["abc"], vec!["a", "bc", ""], vec![]];
        for (i, one) in keys.iter().enumerate() {
            for (j, other) in keys.iter().enumerate() {
                assert_eq!(Key::of_content("n", one) == Key::of_content("n", other), i == j, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn random_keys_differ_and_grow() {
        let keys: Vec<Key> = (0..100).map(|_| Key::random("n")).collect();
        assert!(keys.windows(2).all(|pair| pair[0].value() < pair[1].value()));
    }
}
