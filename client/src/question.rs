//! [`Question`]: what can be asked, and what is answered.

use crate::proto::{self, batch_operation::Operation, batch_result::Result as Answer};

/// What can be asked.
pub(crate) trait Question: Clone + Send {
    /// What is answered.
    type Answer: Send;

    /// As an operation of a Batch.
    fn operation(self) -> Operation;

    /// The answer among those of a Batch.
    fn answer(answer: Answer) -> Option<Self::Answer>;
}

macro_rules! questions {
    ($($verb:ident: $request:ident -> $response:ident),* $(,)?) => {$(
        impl Question for proto::$request {
            type Answer = proto::$response;

            fn operation(self) -> Operation {
                Operation::$verb(self)
            }

            fn answer(answer: Answer) -> Option<Self::Answer> {
                match answer {
                    Answer::$verb(answer) => Some(answer),
                    _ => None,
                }
            }
        }
    )*};
}

questions! {
    Reserve: ReserveRequest -> ReserveResponse,
    Complete: CompleteRequest -> CompleteResponse,
    Fail: FailRequest -> FailResponse,
    Renew: RenewRequest -> RenewResponse,
    Lookup: LookupRequest -> LookupResponse,
    Resolve: ResolveRequest -> ResolveResponse,
}
