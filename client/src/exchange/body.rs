//! Bodies: of requests, read whole, and of answers, read as far as they may be stored.

use std::{
    collections::VecDeque,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header::CONTENT_LENGTH, response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use tokio::time::{Instant, timeout, timeout_at};

pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// How much of a body is read for nothing, so that who sends it gets to read the answer.
const DRAINED_BYTES_MAX: usize = 64 << 20;
/// For how long.
const DRAINED_FOR: Duration = Duration::from_secs(10);
/// For how long an answer is read before it goes out as it comes.
const READ_FOR: Duration = Duration::from_secs(10);

/// The body of a request.
pub(super) enum Received {
    Whole(Bytes),
    /// There is more than one message.
    Several,
    TooLarge,
    Broken,
}

/// Reads a body whole, unless it is larger than that, or has more than one message.
pub(super) async fn received<B: Body>(
    body: B,
    bytes_max: usize,
    message_bytes: impl Fn(&[u8]) -> Option<usize>,
) -> Received {
    let mut body = Box::pin(body);
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return Received::Broken };
        // Trailers of a request are nothing that a handler gets to see here.
        if let Ok(data) = frame.into_data() {
            if bytes.len() + data.remaining() > bytes_max {
                drain(body).await;
                return Received::TooLarge;
            }
            bytes.put(data);
            if message_bytes(&bytes).is_some_and(|message| bytes.len() > message) {
                return Received::Several;
            }
        }
    }
    Received::Whole(bytes.freeze())
}

/// Reads what there is, for nothing.
pub(super) async fn drain<B: Body>(body: B) {
    let mut body = pin!(body);
    let read = async {
        let mut bytes = 0;
        while let Some(Ok(frame)) = body.frame().await {
            bytes += frame.data_ref().map_or(0, Buf::remaining);
            if bytes > DRAINED_BYTES_MAX {
                return;
            }
        }
    };
    // Whoever sends for longer is told nothing.
    let _ = timeout(DRAINED_FOR, read).await;
}

/// The body of an answer, as far as it was read.
pub(super) enum Read<R> {
    Whole {
        body: Bytes,
        trailers: Option<HeaderMap>,
    },
    /// There is more.
    Longer {
        begun: VecDeque<Bytes>,
        rest: Pin<Box<R>>,
    },
    /// It failed midway.
    Broken {
        begun: VecDeque<Bytes>,
        error: BoxError,
    },
}

impl<R> Read<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    /// Reads a body as far as that, for a bounded time, and no more than its first message.
    pub(super) async fn of(body: R, bytes_max: usize, message_bytes: impl Fn(&[u8]) -> Option<usize>) -> Self {
        let end = Instant::now() + READ_FOR;
        let mut body = Box::pin(body);
        let (mut begun, mut bytes, mut bytes_max, mut trailers) = (VecDeque::new(), 0, bytes_max, None);
        loop {
            // Whoever streams for long has its callers wait for the stream, and not for its end.
            let Ok(frame) = timeout_at(end, body.frame()).await else { return Self::Longer { begun, rest: body } };
            match frame.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => {
                    if begun.is_empty() {
                        bytes_max = message_bytes(&data).map_or(bytes_max, |message| message.min(bytes_max));
                    }
                    bytes += data.len();
                    begun.push_back(data);
                    if bytes > bytes_max {
                        return Self::Longer { begun, rest: body };
                    }
                }
                Some(Ok(Err(frame))) => trailers = frame.into_trailers().ok(),
                Some(Err(error)) => return Self::Broken { begun, error: error.into() },
                None => break,
            }
        }
        let body = match (begun.len(), begun.pop_front()) {
            (1, Some(only)) => only,
            (_, first) => first
                .into_iter()
                .chain(begun)
                .fold(BytesMut::with_capacity(bytes), |mut whole, data| {
                    whole.put(data);
                    whole
                })
                .freeze(),
        };
        Self::Whole { body, trailers }
    }

    /// What is not as long as its head says has broken off, although the body itself does not say so.
    pub(super) fn checked(self, head: &response::Parts) -> Self {
        let said = head.headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
        match self {
            Self::Whole { body, .. }
                if head.status != StatusCode::NOT_MODIFIED && said.is_some_and(|said| said != body.len()) =>
            {
                let error = "the body is not as long as its Content-Length says".into();
                Self::Broken { begun: VecDeque::from([body]), error }
            }
            other => other,
        }
    }

    /// A body that nobody waits for the end of.
    pub(super) fn endless(body: R) -> Self {
        Self::Longer { begun: VecDeque::new(), rest: Box::pin(body) }
    }

    pub(super) fn trailers(&self) -> Option<&HeaderMap> {
        match self {
            Self::Whole { trailers, .. } => trailers.as_ref(),
            Self::Longer { .. } | Self::Broken { .. } => None,
        }
    }

    /// All of it, for the first caller.
    pub(super) fn into_body(self) -> AnswerBody<R> {
        match self {
            Self::Whole { body, trailers } => AnswerBody::whole(body, trailers),
            Self::Longer { begun, rest } => AnswerBody(Kind::Longer { begun, rest }),
            Self::Broken { begun, error } => AnswerBody(Kind::Broken { begun, error: Some(error) }),
        }
    }
}

/// The body of an answer: of the handler, or of one that was stored.
#[derive(Debug)]
pub struct AnswerBody<R>(Kind<R>);

#[derive(Debug)]
enum Kind<R> {
    Whole { body: Full<Bytes>, trailers: Option<HeaderMap> },
    Inner(Pin<Box<R>>),
    Longer { begun: VecDeque<Bytes>, rest: Pin<Box<R>> },
    Broken { begun: VecDeque<Bytes>, error: Option<BoxError> },
}

impl<R> AnswerBody<R> {
    pub(super) fn whole(body: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self(Kind::Whole { body: Full::new(body), trailers })
    }

    pub(crate) fn full(body: Full<Bytes>) -> Self {
        Self(Kind::Whole { body, trailers: None })
    }

    pub(crate) fn inner(body: R) -> Self {
        Self(Kind::Inner(Box::pin(body)))
    }
}

impl<R> Body for AnswerBody<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            Kind::Whole { body, trailers } => match ready!(Pin::new(body).poll_frame(context)) {
                Some(frame) => Poll::Ready(Some(frame.map_err(|never| match never {}))),
                None => Poll::Ready(trailers.take().map(|trailers| Ok(Frame::trailers(trailers)))),
            },
            Kind::Inner(body) => body.as_mut().poll_frame(context).map_err(Into::into),
            Kind::Longer { begun, rest } => match begun.pop_front() {
                Some(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
                None => rest.as_mut().poll_frame(context).map_err(Into::into),
            },
            Kind::Broken { begun, error } => match begun.pop_front() {
                Some(data) => Poll::Ready(Some(Ok(Frame::data(data)))),
                None => Poll::Ready(error.take().map(Err)),
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Whole { body, trailers } => body.is_end_stream() && trailers.is_none(),
            Kind::Inner(body) => body.is_end_stream(),
            Kind::Longer { begun, rest } => begun.is_empty() && rest.is_end_stream(),
            Kind::Broken { begun, error } => begun.is_empty() && error.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            // Of a body whose size is known the trailers would not be sent.
            Kind::Whole { trailers: Some(_), .. } => SizeHint::new(),
            Kind::Whole { body, .. } => body.size_hint(),
            Kind::Inner(body) => body.size_hint(),
            Kind::Longer { begun, rest } => {
                let begun: u64 = begun.iter().map(|data| data.len() as u64).sum();
                let rest = rest.size_hint();
                let mut hint = SizeHint::new();
                hint.set_lower(begun.saturating_add(rest.lower()));
                if let Some(upper) = rest.upper() {
                    hint.set_upper(begun.saturating_add(upper));
                }
                hint
            }
            Kind::Broken { .. } => SizeHint::new(),
        }
    }
}
