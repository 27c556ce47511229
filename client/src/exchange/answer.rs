//! Answers of HTTP as results, and back.
//!
//! Names and values go as they are, in their order; each byte of a value is one code point. Trailers have a mark before their
//! names, which no header can have.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use super::body::AnswerBody;
use crate::result::StoredResult;

/// What stands before the names of trailers.
const TRAILER: &str = "trailer:";

/// Headers of one connection or of one moment, and those that let somebody in.
const NOT_STORED: [HeaderName; 17] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::SET_COOKIE,
    header::DATE,
    header::AUTHORIZATION,
    header::WWW_AUTHENTICATE,
    HeaderName::from_static("authentication-info"),
    HeaderName::from_static("proxy-authentication-info"),
    HeaderName::from_static("set-cookie2"),
    // It is computed anew from the body.
    header::CONTENT_LENGTH,
];

/// An answer as what duplicates get; nothing if its headers are more than may be stored.
pub(super) fn stored(
    code: i32,
    headers: &HeaderMap,
    body: &Bytes,
    trailers: Option<&HeaderMap>,
) -> Option<StoredResult> {
    let of_the_connection: Vec<String> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|names| names.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    let is_stored =
        |name: &HeaderName| !NOT_STORED.contains(name) && !of_the_connection.iter().any(|other| other == name.as_str());
    let headers =
        headers.iter().filter(|(name, _)| is_stored(name)).map(|(name, value)| (name.to_string(), text(value)));
    let trailers = trailers.into_iter().flatten().filter(|(name, _)| is_stored(name));
    let trailers = trailers.map(|(name, value)| (format!("{TRAILER}{name}"), text(value)));
    let metadata: Vec<(String, String)> = headers.chain(trailers).collect();
    Some(StoredResult { code, metadata, body: body.clone() }).filter(StoredResult::fits)
}

/// What duplicates get, as an answer.
pub(super) fn replayed<R>(result: StoredResult) -> Response<AnswerBody<R>> {
    let (mut headers, mut trailers) = (HeaderMap::new(), HeaderMap::new());
    for (name, value) in &result.metadata {
        let (map, name) = match name.strip_prefix(TRAILER) {
            Some(name) => (&mut trailers, name),
            None => (&mut headers, name.as_str()),
        };
        // What was written by another program is shown as far as it is a header.
        if let (Ok(name), Some(value)) = (HeaderName::try_from(name), value_of(value)) {
            map.append(name, value);
        }
    }
    // HTTP/1.1 sends only those trailers that were announced. In gRPC they are known.
    let is_grpc =
        headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
    for name in trailers.keys().filter(|_| !is_grpc) {
        headers.append(header::TRAILER, HeaderValue::from_name(name.clone()));
    }
    let mut response = Response::new(AnswerBody::whole(result.body, (!trailers.is_empty()).then_some(trailers)));
    *response.status_mut() =
        u16::try_from(result.code).ok().and_then(|code| StatusCode::from_u16(code).ok()).unwrap_or(StatusCode::OK);
    *response.headers_mut() = headers;
    response
}

/// Each byte as one code point, U+0000 to U+00FF.
fn text(value: &HeaderValue) -> String {
    value.as_bytes().iter().map(|byte| char::from(*byte)).collect()
}

fn value_of(text: &str) -> Option<HeaderValue> {
    let bytes = text.chars().map(|character| u8::try_from(u32::from(character))).collect::<Result<Vec<_>, _>>().ok()?;
    HeaderValue::from_bytes(&bytes).ok()
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt, Empty};

    use super::*;

    #[tokio::test]
    async fn an_answer_comes_back_byte_for_byte_but_for_what_is_of_its_moment() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("x-list", &b"1"[..]),
            ("content-type", b"text/plain"),
            ("x-list", b"2"),
            ("x-bytes", b"\xc3\xa9\xff"),
            ("date", b"today"),
            ("set-cookie", b"session=1"),
            ("connection", b"close, X-Hop"),
            ("x-hop", b"1"),
            ("content-length", b"999"),
        ] {
            headers.append(HeaderName::try_from(name).unwrap(), HeaderValue::from_bytes(value).unwrap());
        }
        let trailers = HeaderMap::from_iter([(HeaderName::from_static("x-sum"), HeaderValue::from_static("7"))]);
        let mut sent = trailers.clone();
        sent.insert("set-cookie", HeaderValue::from_static("session=1"));
        let result = stored(201, &headers, &Bytes::from_static(b"\x00\xff"), Some(&sent)).unwrap();
        let response = replayed::<Empty<Bytes>>(result);
        assert_eq!(response.status(), 201);
        let names: Vec<&str> = response.headers().keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["x-list", "content-type", "x-bytes", "trailer"]);
        let list: Vec<_> = response.headers().get_all("x-list").iter().collect();
        assert_eq!(list, ["1", "2"]);
        assert_eq!(response.headers()["x-bytes"].as_bytes(), b"\xc3\xa9\xff");
        let body = response.into_body().collect().await.unwrap();
        assert_eq!(body.trailers().unwrap(), &trailers);
        assert_eq!(body.to_bytes().as_ref(), b"\x00\xff");
    }

    #[test]
    fn headers_beyond_what_the_service_takes_are_not_stored_in_part() {
        let headers = |count: usize, bytes: usize| -> HeaderMap {
            let value = HeaderValue::from_bytes(&vec![b'v'; bytes]).unwrap();
            (0..count).map(|n| (HeaderName::try_from(format!("x-{n:03}")).unwrap(), value.clone())).collect()
        };
        let is_stored = |count, bytes| stored(200, &headers(count, bytes), &Bytes::new(), None).is_some();
        assert!(is_stored(64, 1) && !is_stored(65, 1));
        assert!(is_stored(1, (16 << 10) - 5) && !is_stored(1, (16 << 10) - 4));
    }
}
