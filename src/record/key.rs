//! [`Key`]: the name of one operation, and the [`Uuid`] under which stores keep it.

use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::Arc,
};

use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::Invalid;

/// The longest namespace, in bytes.
pub const NAMESPACE_BYTES_MAX: usize = 128;
/// The longest subject and the longest value, in bytes.
pub const KEY_TEXT_BYTES_MAX: usize = 255;

/// Names one operation: who owns it, on whose behalf it runs, and what the caller calls it.
///
/// Compared byte for byte. Cloning is cheap.
#[derive(Clone)]
pub struct Key(Arc<Parts>);

struct Parts {
    id: Uuid,
    namespace: Box<str>,
    subject: Box<str>,
    value: Box<str>,
}

impl Key {
    /// Validates the three texts, and gives each fault with the name of its field.
    pub fn new(namespace: &str, subject: &str, value: &str) -> Result<Self, Vec<(&'static str, Invalid)>> {
        let faults: Vec<_> = [
            ("namespace", check_namespace(namespace)),
            ("subject", check_text(subject)),
            ("value", if value.is_empty() { Err(Invalid("must not be empty")) } else { check_text(value) }),
        ]
        .into_iter()
        .filter_map(|(field, checked)| checked.err().map(|fault| (field, fault)))
        .collect();
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(Self(Arc::new(Parts {
            id: id(namespace, subject, value),
            namespace: namespace.into(),
            subject: subject.into(),
            value: value.into(),
        })))
    }

    /// The primary key of the record: a function of the three texts alone, frozen for ever.
    ///
    /// Where the value is a UUIDv7 in its 36-character lower-case form it starts with that 48-bit timestamp, so that keys
    /// made at about the same time lie together in the index; the rest is SHA-256 over the length-framed texts.
    pub fn id(&self) -> Uuid {
        self.0.id
    }

    /// How many bytes its texts have.
    pub fn bytes(&self) -> usize {
        self.namespace().len() + self.subject().len() + self.value().len()
    }

    /// The service and operation that own the key.
    pub fn namespace(&self) -> &str {
        &self.0.namespace
    }

    /// On whose behalf; may be empty.
    pub fn subject(&self) -> &str {
        &self.0.subject
    }

    /// What the caller sent.
    pub fn value(&self) -> &str {
        &self.0.value
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&self.0, &other.0);
        a.id == b.id && a.value == b.value && a.subject == b.subject && a.namespace == b.namespace
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.id.hash(state);
    }
}

/// Shows the namespace only: subjects and values may be personal, and logs travel far.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({}/{})", self.namespace(), self.id())
    }
}

fn check_namespace(namespace: &str) -> Result<(), Invalid> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte);
    match namespace.len() {
        0 => Err(Invalid("must not be empty")),
        1..=NAMESPACE_BYTES_MAX if namespace.bytes().all(allowed) => Ok(()),
        1..=NAMESPACE_BYTES_MAX => Err(Invalid("must consist of A-Z a-z 0-9 . _ / -")),
        _ => Err(Invalid("must have at most 128 bytes")),
    }
}

fn check_text(text: &str) -> Result<(), Invalid> {
    if text.len() > KEY_TEXT_BYTES_MAX {
        return Err(Invalid("must have at most 255 bytes"));
    }
    if text.chars().any(char::is_control) {
        return Err(Invalid("must not contain control characters"));
    }
    Ok(())
}

fn id(namespace: &str, subject: &str, value: &str) -> Uuid {
    let mut hash = Sha256::new();
    for text in [namespace, subject, value] {
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text);
    }
    let digest: [u8; 32] = hash.finalize().into();
    let mut id = [0; 16];
    match version_7(value) {
        Some(uuid) => {
            let (timestamp, rest) = id.split_at_mut(6);
            timestamp.copy_from_slice(uuid.as_bytes().split_at(6).0);
            rest.copy_from_slice(digest.split_at(10).0);
        }
        None => id.copy_from_slice(digest.split_at(16).0),
    }
    Uuid::from_bytes(id)
}

fn version_7(value: &str) -> Option<Uuid> {
    // 36 bytes that parse are the hyphenated form.
    if value.len() != 36 || value.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return None;
    }
    let uuid = Uuid::try_parse(value).ok()?;
    (uuid.get_version_num() == 7 && uuid.get_variant() == uuid::Variant::RFC4122).then_some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(namespace: &str, subject: &str, value: &str) -> Key {
        Key::new(namespace, subject, value).unwrap()
    }

    /// Stored rows are found by these for ever: a change here orphans every record in every database.
    #[test]
    fn ids_are_frozen() {
        let vectors = [
            ("payments.charge", "", "order-1", "69bb4f76-87c2-357f-cfd4-23422f22dee9"),
            ("payments.charge", "ann", "order-1", "5b934f34-878e-df72-87b6-c6238d405909"),
            ("a", "b", "\u{e9}", "e2554290-fc1e-8c2d-fede-fc79e6b631ba"),
            ("payments.charge", "ann", "01890a5d-ac96-774b-bcce-b302099a8057", "01890a5d-ac96-4187-b1f5-bee99ff33a3f"),
            ("payments.charge", "ann", "01890A5D-AC96-774B-BCCE-B302099A8057", "11d3425f-d933-2a3e-188c-2304ada2b460"),
            ("payments.charge", "ann", "01890a5d-ac96-474b-bcce-b302099a8057", "c55d0bd1-dab2-40b0-e75c-66287dbce527"),
            ("payments.charge", "ann", "01890a5d-ac96-774b-ccce-b302099a8057", "2665d9d7-91e1-5f30-188c-7d704e275f53"),
            ("payments.charge", "ann", "01890a5dac96774bbcceb302099a8057", "1786dfa8-943c-8c95-bcc9-a6d1e69483f8"),
        ];
        for (namespace, subject, value, id) in vectors {
            assert_eq!(key(namespace, subject, value).id().to_string(), id, "{namespace} {subject} {value}");
        }
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        assert_ne!(key("a", "b", "c").id(), key("a", "", "bc").id());
        assert_ne!(key("n", "a:b", "c"), key("n", "a", "b:c"));
        assert_ne!(key("n", "ann", "k"), key("n", "bob", "k"));
    }

    #[test]
    fn texts_are_compared_byte_for_byte() {
        let distinct = ["Ord-1", "ord-1", "k", "k ", "\u{e9}", "e\u{301}"].map(|value| key("n", "", value));
        for (i, a) in distinct.iter().enumerate() {
            for b in &distinct[i + 1..] {
                assert_ne!(a, b);
                assert_ne!(a.id(), b.id());
            }
        }
    }

    #[test]
    fn limits_are_in_bytes_and_exact() {
        assert!(Key::new(&"n".repeat(128), &"s".repeat(255), &"v".repeat(255)).is_ok());
        for (namespace, subject, value, field) in [
            ("n".repeat(129), String::new(), "v".into(), "namespace"),
            (String::new(), String::new(), "v".into(), "namespace"),
            ("n n".into(), String::new(), "v".into(), "namespace"),
            ("n".into(), "s".repeat(256), "v".into(), "subject"),
            ("n".into(), "\u{e9}".repeat(128), "v".into(), "subject"),
            ("n".into(), "\0".into(), "v".into(), "subject"),
            ("n".into(), String::new(), String::new(), "value"),
            ("n".into(), String::new(), "v".repeat(256), "value"),
            ("n".into(), String::new(), "a\nb".into(), "value"),
            ("n".into(), String::new(), "a\u{85}b".into(), "value"),
        ] {
            let faults = Key::new(&namespace, &subject, &value).unwrap_err();
            assert_eq!(faults.len(), 1);
            assert_eq!(faults[0].0, field);
        }
    }
}
