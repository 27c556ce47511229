//! [`Fingerprint`]: what tells one request from another under the same key.

use std::fmt::Write;

use prost::Message;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// The hash of a request. The same key with another fingerprint is refused: a caller has used its key twice.
///
/// Each kind of fingerprint names in its scheme how it was made, and is made in that way for ever. Fingerprints of different
/// schemes do not compare, so a service may change from one to the other and its old records still answer.
///
/// ```
/// use onceward_client::Fingerprint;
///
/// let fingerprint = Fingerprint::of_bytes(r#"{"cents":100}"#);
/// assert!(fingerprint.as_str().starts_with("sha256-v1:"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(String);

impl Fingerprint {
    /// Of a request as it came in.
    pub fn of_bytes(bytes: impl AsRef<[u8]>) -> Self {
        Self::new("sha256-v1", Sha256::new().chain_update(bytes))
    }

    /// Of a request in parts. How they are cut counts: `["a", "bc"]` is not `["ab", "c"]`.
    pub fn of_parts<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        Self::new("parts-sha256-v1", parts.into_iter().fold(Sha256::new(), |hash, part| framed(hash, part.as_ref())))
    }

    /// Of a value, whatever the order of its fields and of the entries of its maps.
    ///
    /// # Errors
    ///
    /// The value cannot be written as JSON: a map has keys that are no texts, or its `Serialize` failed.
    pub fn of_value(value: &(impl Serialize + ?Sized)) -> Result<Self, serde_json::Error> {
        let value = serde_json::to_value(value)?;
        let mut hash = Sha256::new();
        hash_value(&mut hash, &value);
        Ok(Self::new("value-sha256-v1", hash))
    }

    /// Of a protocol buffers message. One with `map` fields has the same bytes each time only if they are generated as
    /// `BTreeMap` (`btree_map` of prost-build).
    pub fn of_message(message: &impl Message) -> Self {
        Self::new("message-sha256-v1", Sha256::new().chain_update(message.encode_to_vec()))
    }

    /// As it is sent: `scheme:hex`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn new(scheme: &str, hash: Sha256) -> Self {
        Self(format!("{scheme}:{}", hex(&hash.finalize())))
    }
}

/// The hash with one more part, which begins with its length: no two lists of parts hash the same bytes.
pub(crate) fn framed(hash: Sha256, part: &[u8]) -> Sha256 {
    hash.chain_update((part.len() as u64).to_be_bytes()).chain_update(part)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a text cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Each value begins with its kind and its length, and fields come in the order of their names.
fn hash_value(hash: &mut Sha256, value: &Value) {
    let mut leaf = |kind: u8, text: &str| {
        hash.update([kind]);
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text);
    };
    match value {
        Value::Null => leaf(b'n', ""),
        Value::Bool(value) => leaf(b'b', if *value { "true" } else { "false" }),
        Value::Number(number) => leaf(b'd', &number.to_string()),
        Value::String(text) => leaf(b's', text),
        Value::Array(items) => {
            hash.update([b'a']);
            hash.update((items.len() as u64).to_be_bytes());
            items.iter().for_each(|item| hash_value(hash, item));
        }
        Value::Object(fields) => {
            hash.update([b'o']);
            hash.update((fields.len() as u64).to_be_bytes());
            // Not the order of the map: another crate of the program may have chosen that it keeps the order of insertion.
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_unstable_by_key(|(name, _)| *name);
            for (name, value) in fields {
                hash.update((name.len() as u64).to_be_bytes());
                hash.update(name);
                hash_value(hash, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fingerprints_are_the_same_for_ever() {
        let value = json!({"b": [1, -2, 1.5, null, true], "a": {"text": "ä"}});
        let fingerprints = [
            Fingerprint::of_bytes("request"),
            Fingerprint::of_parts(["POST", "/pay"]),
            Fingerprint::of_value(&value).unwrap(),
            Fingerprint::of_message(&crate::proto::Key {
                namespace: "n".into(),
                subject: "s".into(),
                value: "v".into(),
            }),
        ];
        assert_eq!(
            fingerprints.map(|fingerprint| fingerprint.0),
            [
                "sha256-v1:1f58b9145b24d108d7ac38887338b3ea3229833b9c1e418250343f907bfd1047",
                "parts-sha256-v1:dcf6ef7c655e73c4f388ba367ea8dda5a57727b9558aaeab4e497c8ae6ad95c4",
                "value-sha256-v1:470605a393e2e2236c168ad37af671ffd5e2dd1ad30d662324af310328ea2049",
                "message-sha256-v1:2d7f985b7c0557950eb49ab63c1f873134141574497cafec6c59ef589adc4549",
            ]
        );
    }

    #[test]
    fn the_order_of_fields_does_not_count_and_everything_else_does() {
        #[derive(Serialize)]
        struct One {
            a: u8,
            b: &'static str,
        }
        #[derive(Serialize)]
        struct Other {
            b: &'static str,
            a: u8,
        }
        let of = |value: Value| Fingerprint::of_value(&value).unwrap();
        assert_eq!(
            Fingerprint::of_value(&One { a: 1, b: "x" }).unwrap(),
            Fingerprint::of_value(&Other { b: "x", a: 1 }).unwrap()
        );
        let values = [
            json!({"a": 1}),
            json!({"a": "1"}),
            json!({"a": [1]}),
            json!({"a": {"1": null}}),
            json!({"a": null}),
            json!({}),
            json!([]),
            json!(["a", 1]),
            json!([["a"], 1]),
            json!([["a", 1]]),
            json!("a"),
            json!(""),
            json!(null),
            json!(false),
        ];
        for (i, one) in values.iter().enumerate() {
            for (j, other) in values.iter().enumerate() {
                assert_eq!(of(one.clone()) == of(other.clone()), i == j, "{one} {other}");
            }
        }
    }

    #[test]
    fn a_value_that_is_no_json_has_no_fingerprint() {
        assert!(Fingerprint::of_value(&std::collections::BTreeMap::from([((1, 2), 3)])).is_err());
    }
}
