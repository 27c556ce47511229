//! The stored form of result metadata: a JSON array of `[name, value]` pairs, readable in any SQL shell.
//!
//! It is text, never a JSON column: databases drop the order, duplicates and some characters of JSON that they parse.

/// The stored form; `None` for no pairs.
pub(super) fn encode(metadata: &[(String, String)]) -> Option<String> {
    if metadata.is_empty() {
        return None;
    }
    // Pairs of strings always have a JSON form.
    serde_json::to_string(metadata).ok()
}

/// The stored form read back.
pub(super) fn decode(text: Option<&str>) -> Result<Vec<(String, String)>, serde_json::Error> {
    text.map_or(Ok(Vec::new()), serde_json::from_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_round_trips_without_control_characters() {
        let pairs: Vec<(String, String)> =
            [("", ""), ("a", "\0\u{1}\n\u{ff}"), ("a", "\"[]\\"), ("\u{1f600}", "\u{10ffff}")]
                .map(|(name, value)| (name.into(), value.into()))
                .into();
        let text = encode(&pairs).unwrap();
        assert!(!text.contains('\0'));
        assert_eq!(decode(Some(&text)).unwrap(), pairs);
        assert_eq!(decode(encode(&[]).as_deref()).unwrap(), []);
    }
}
