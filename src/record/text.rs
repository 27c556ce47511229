//! The short texts of a reservation, each valid by construction: [`Token`], [`Fingerprint`], [`Owner`], [`Origin`].

use std::{fmt, sync::Arc};

use sha2::{Digest, Sha256};

use super::Invalid;

/// The longest token, in characters.
pub const TOKEN_LENGTH_MAX: usize = 64;
/// The longest fingerprint, in characters.
pub const FINGERPRINT_LENGTH_MAX: usize = 128;
/// The longest owner, in characters.
pub const OWNER_LENGTH_MAX: usize = 128;

/// Names one execution: whoever knows the token holds the reservation.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Token(Arc<str>);

impl Token {
    /// 1 to 64 characters of printable ASCII.
    pub fn new(text: &str) -> Result<Self, Invalid> {
        match text.len() {
            0 => Err(Invalid("must not be empty")),
            1..=TOKEN_LENGTH_MAX if printable(text) => Ok(Self(text.into())),
            1..=TOKEN_LENGTH_MAX => Err(Invalid("must be printable ASCII")),
            _ => Err(Invalid("must have at most 64 characters")),
        }
    }

    /// The token as it was sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A token is a secret between its caller and the service: it never reaches a log.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// The tokens that held a record before the current one, as short hashes: the last 16, newest last.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct EarlierTokens(Vec<u8>);

impl EarlierTokens {
    const HASH_BYTES: usize = 8;
    const COUNT_MAX: usize = 16;

    /// Whether the token held the record before. Wrong for one token in 2⁶⁰.
    pub fn contains(&self, token: &Token) -> bool {
        let hash = Self::hash(token);
        self.0.chunks_exact(Self::HASH_BYTES).any(|earlier| earlier == hash)
    }

    /// These and one more; the oldest leaves when there are too many.
    pub fn with(&self, token: &Token) -> Self {
        let room = (Self::COUNT_MAX - 1) * Self::HASH_BYTES;
        let kept = self.0.len().saturating_sub(room);
        let mut bytes: Vec<u8> = self.0.iter().skip(kept).copied().collect();
        bytes.extend(Self::hash(token));
        Self(bytes)
    }

    /// The form in which they are stored.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The stored form read back.
    pub fn from_bytes(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    fn hash(token: &Token) -> [u8; Self::HASH_BYTES] {
        let digest: [u8; 32] = Sha256::digest(token.as_str()).into();
        std::array::from_fn(|i| digest.get(i).copied().unwrap_or_default())
    }
}

/// The hash of a request, as `scheme:hex`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fingerprint(Arc<str>);

impl Fingerprint {
    /// `[a-z0-9-]+:[0-9a-f]+`, at most 128 characters.
    pub fn new(text: &str) -> Result<Self, Invalid> {
        if text.len() > FINGERPRINT_LENGTH_MAX {
            return Err(Invalid("must have at most 128 characters"));
        }
        let scheme = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        let hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        match text.split_once(':') {
            Some((before, after))
                if !before.is_empty() && !after.is_empty() && before.bytes().all(scheme) && after.bytes().all(hex) =>
            {
                Ok(Self(text.into()))
            }
            _ => Err(Invalid("must be a scheme of a-z 0-9 -, a colon, and lower-case hex digits")),
        }
    }

    /// Whether the two hash different requests. Hashes of different schemes do not tell.
    pub fn differs_from(&self, other: &Self) -> bool {
        self.scheme() == other.scheme() && self != other
    }

    /// The fingerprint as it was sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn scheme(&self) -> Option<&str> {
        self.0.split(':').next()
    }
}

/// Who reserved, for people who look.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Owner(Arc<str>);

impl Owner {
    /// 1 to 128 characters of printable ASCII.
    pub fn new(text: &str) -> Result<Self, Invalid> {
        match text.len() {
            0 => Err(Invalid("must not be empty")),
            1..=OWNER_LENGTH_MAX if printable(text) => Ok(Self(text.into())),
            1..=OWNER_LENGTH_MAX => Err(Invalid("must be printable ASCII")),
            _ => Err(Invalid("must have at most 128 characters")),
        }
    }

    /// The owner as it was sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The trace that reserved: a W3C [`traceparent`](https://www.w3.org/TR/trace-context/#traceparent-header).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Origin(Arc<str>);

impl Origin {
    /// Reads a `traceparent`; `None` where it is malformed, which W3C asks to ignore.
    ///
    /// One of a later version is read by the fields that version 00 knows, and kept as version 00.
    pub fn parse(text: &str) -> Option<Self> {
        let hex = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let set = |text: &str| text.bytes().any(|byte| byte != b'0');
        let mut fields = text.splitn(5, '-');
        let version = fields.next().filter(|f| f.len() == 2 && hex(f) && *f != "ff")?;
        let trace = fields.next().filter(|f| f.len() == 32 && hex(f) && set(f))?;
        let parent = fields.next().filter(|f| f.len() == 16 && hex(f) && set(f))?;
        let flags = fields.next().filter(|f| f.len() == 2 && hex(f))?;
        if version == "00" && fields.next().is_some() {
            return None;
        }
        Some(Self(format!("00-{trace}-{parent}-{flags}").into()))
    }

    /// The `traceparent`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn printable(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_short_printable_ascii() {
        assert!(Token::new(&"t".repeat(64)).is_ok());
        for refused in ["", &"t".repeat(65), "a\0", "\u{e9}", "a\tb", "\u{7f}"] {
            assert!(Token::new(refused).is_err());
        }
    }

    #[test]
    fn earlier_tokens_remember_the_last_sixteen() {
        let tokens: Vec<_> = (0..17).map(|i| Token::new(&format!("token-{i}")).unwrap()).collect();
        let earlier = tokens.iter().fold(EarlierTokens::default(), |earlier, token| earlier.with(token));
        assert!(!earlier.contains(&tokens[0]));
        assert!(tokens[1..].iter().all(|token| earlier.contains(token)));
        assert_eq!(earlier.as_bytes().len(), 16 * 8);
    }

    #[test]
    fn fingerprints_compare_within_one_scheme_only() {
        let print = |text| Fingerprint::new(text).unwrap();
        assert!(print("sha256-v1:ab").differs_from(&print("sha256-v1:ac")));
        assert!(!print("sha256-v1:ab").differs_from(&print("sha256-v1:ab")));
        assert!(!print("sha256-v1:ab").differs_from(&print("sha256-v2:ac")));
    }

    #[test]
    fn fingerprints_name_their_scheme() {
        assert!(Fingerprint::new(&format!("x:{}", "a".repeat(126))).is_ok());
        for refused in ["", "ab", ":ab", "x:", "X:ab", "x:AB", "x:ag", "x:a:b", &format!("x:{}", "a".repeat(127))] {
            assert!(Fingerprint::new(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn owners_are_printable_ascii() {
        assert!(Owner::new(&"o".repeat(128)).is_ok());
        for refused in ["", &"o".repeat(129), "a\u{1}b", "\u{e9}"] {
            assert!(Owner::new(refused).is_err());
        }
    }

    #[test]
    fn malformed_traceparents_are_ignored() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(Origin::parse(good).unwrap().as_str(), good);
        let later = good.replacen("00", "cc", 1) + "-what-the-future-brings";
        assert_eq!(Origin::parse(&later).unwrap().as_str(), good);
        for ignored in [
            "",
            "00",
            &good.to_uppercase(),
            &good.replacen("00", "ff", 1),
            &format!("{good}-more"),
            &good.replace("b7ad6b7169203331", "0000000000000000"),
            &good.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &good[..54],
        ] {
            assert_eq!(Origin::parse(ignored), None, "{ignored}");
        }
    }
}
