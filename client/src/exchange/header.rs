//! The value of an `Idempotency-Key` header.

use http::{HeaderMap, HeaderName};

/// The longest key that the service takes, in bytes.
const KEY_BYTES_MAX: usize = 255;

/// The key of a request, if it has one; or what is wrong with it.
///
/// `"k"`, a string of RFC 9651, and a bare `k` are the same key, as clients of either kind exist. A bare one has no space, comma,
/// semicolon, quote or backslash: several headers, joined on the way, look like one with a comma.
pub(super) fn key(headers: &HeaderMap, name: &HeaderName) -> Result<Option<String>, &'static str> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err("there is more than one key");
    }
    let text =
        std::str::from_utf8(value.as_bytes()).ok().filter(|text| text.is_ascii()).ok_or("a key is printable ASCII")?;
    let text = text.trim_matches([' ', '\t']);
    let key = match text.strip_prefix('"') {
        Some(rest) => unquoted(rest)?,
        None if text.contains([' ', '\t', ',', ';', '"', '\\']) => {
            return Err("a key without quotes has no space, comma, semicolon, quote or backslash");
        }
        None => text.to_owned(),
    };
    if key.is_empty() {
        return Err("a key is not empty");
    }
    if key.len() > KEY_BYTES_MAX {
        return Err("a key has at most 255 characters");
    }
    if key.contains(|character: char| !matches!(character, ' '..='~')) {
        return Err("a key is printable ASCII");
    }
    Ok(Some(key))
}

/// What a quoted string says, from behind its first quote.
fn unquoted(rest: &str) -> Result<String, &'static str> {
    let (mut key, mut characters) = (String::new(), rest.chars());
    loop {
        match characters.next() {
            Some('"') if characters.as_str().is_empty() => return Ok(key),
            Some('"') => return Err("nothing follows a quoted key"),
            Some('\\') => match characters.next() {
                Some(escaped @ ('"' | '\\')) => key.push(escaped),
                _ => return Err("a backslash in a quoted key stands before a quote or a backslash"),
            },
            Some(character) => key.push(character),
            None => return Err("a quoted key ends with a quote"),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    const NAME: HeaderName = HeaderName::from_static("idempotency-key");

    fn of(values: &[&[u8]]) -> Result<Option<String>, &'static str> {
        let headers = values.iter().map(|value| (NAME, HeaderValue::from_bytes(value).unwrap())).collect();
        key(&headers, &NAME)
    }

    #[test]
    fn quoted_and_bare_are_the_same_key() {
        for (value, expected) in [
            (&b"k-1"[..], "k-1"),
            (b"\"k-1\"", "k-1"),
            (b"\t \"k-1\"  ", "k-1"),
            (br#""a\"b\\c""#, r#"a"b\c"#),
            (b"\"a b, c;d\"", "a b, c;d"),
            (b"Zm9v+/==", "Zm9v+/=="),
        ] {
            assert_eq!(of(&[value]), Ok(Some(expected.into())), "{value:?}");
        }
        assert_eq!(of(&[]), Ok(None));
    }

    #[test]
    fn what_is_no_key_is_refused_and_never_taken_for_none() {
        let long = [b'k'; 256];
        for value in [
            &b""[..],
            b"  ",
            b"\"\"",
            b"K, K",
            b"a b",
            b"\"k-1",
            b"\"k-1\";p=1",
            b"\"k\" \"l\"",
            b"k\"",
            b"a\\b",
            br#""a\b""#,
            br#""a\"#,
            b"\xc3\xa9",
            b"\xff",
            b"\"\xc3\xa9\"",
            b"a\tb",
            &long,
        ] {
            assert!(of(&[value]).is_err(), "{value:?}");
        }
        assert!(of(&[b"k", b"k"]).is_err());
        assert!(of(&[&long[..255]]).is_ok());
    }

    proptest! {
        #[test]
        fn no_header_makes_it_panic_and_every_quoted_text_comes_back(bytes in prop::collection::vec(any::<u8>(), 0..300), text in "[ -~]{1,255}") {
            if let Ok(value) = HeaderValue::from_bytes(&bytes) {
                let _ = key(&HeaderMap::from_iter([(NAME, value)]), &NAME);
            }
            let quoted = format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""));
            prop_assert_eq!(of(&[quoted.as_bytes()]), Ok(Some(text)));
        }
    }
}
