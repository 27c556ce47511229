//! Batch: independent operations, those of one key in order.

use onceward::proto::{
    BatchOperation, BatchRequest, BatchResult, CompleteRequest, Key, LookupRequest, ReserveRequest, Result as Stored,
    batch_operation::Operation, batch_result::Result as Answer, reserve_response::Outcome,
};
use prost::Message;
use rstest::rstest;
use sqlx::{Connection, PgConnection};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::support::*;

async fn batch(client: &Client, operations: Vec<Operation>) -> Result<Vec<BatchResult>, Status> {
    let operations = operations.into_iter().map(|operation| BatchOperation { operation: Some(operation) }).collect();
    Ok(client.0.clone().batch(BatchRequest { operations }).await?.into_inner().results)
}

/// One item's answer as if it had been a call of its own.
fn single(result: &BatchResult) -> Result<Answer, Status> {
    match result.result.clone().unwrap() {
        Answer::Error(error) => {
            Err(Status::with_details(Code::from(error.code), error.message.clone(), error.encode_to_vec().into()))
        }
        answer => Ok(answer),
    }
}

fn reserving(key: &Key, token: &str) -> Operation {
    Operation::Reserve(reserve(key, token))
}

fn completing(key: &Key, token: &str, body: &[u8]) -> Operation {
    Operation::Complete(complete(key, token, body))
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn operations_of_one_key_act_in_order(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let (a, b) = (fresh_key(), fresh_key());
    let results = batch(
        &client,
        vec![
            reserving(&a, "t"),
            reserving(&b, "t"),
            completing(&a, "t", b"done"),
            reserving(&a, "u"),
            completing(&b, "wrong", b"r"),
            Operation::Renew(renew(&b, "t")),
            Operation::Lookup(LookupRequest { key: Some(a.clone()) }),
        ],
    )
    .await
    .unwrap();
    let answers: Vec<_> = results.iter().map(single).collect();
    assert!(matches!(&answers[0], Ok(Answer::Reserve(r)) if matches!(r.outcome, Some(Outcome::Acquired(_)))));
    assert!(matches!(&answers[1], Ok(Answer::Reserve(r)) if matches!(r.outcome, Some(Outcome::Acquired(_)))));
    assert!(matches!(&answers[2], Ok(Answer::Complete(c)) if !c.already_completed));
    assert!(matches!(&answers[3], Ok(Answer::Reserve(r)) if matches!(r.outcome, Some(Outcome::Completed(_)))));
    refused(answers[4].clone(), Code::Aborted, "LEASE_LOST");
    assert!(matches!(&answers[5], Ok(Answer::Renew(_))));
    assert!(matches!(&answers[6], Ok(Answer::Lookup(_))));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_bad_item_harms_no_other(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let (a, b) = (fresh_key(), fresh_key());
    let waiting = Operation::Reserve(ReserveRequest { wait: Some(duration(SECOND)), ..reserve(&a, "t") });
    let keyless = Operation::Complete(CompleteRequest::default());
    let results = batch(&client, vec![waiting, keyless, reserving(&a, "t"), reserving(&b, "t")]).await.unwrap();
    invalid(single(&results[0]), &["wait"]);
    invalid(single(&results[1]), &["key", "token"]);
    assert!(single(&results[2]).is_ok() && single(&results[3]).is_ok());
    let empty = BatchRequest { operations: vec![BatchOperation::default()] };
    let results = client.0.clone().batch(empty).await.unwrap().into_inner().results;
    invalid(single(&results[0]), &["operation"]);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_operations_work_and_one_more_is_refused(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let operations = |count| (0..count).map(|_| reserving(&fresh_key(), "t")).collect::<Vec<_>>();
    let results = batch(&client, operations(500)).await.unwrap();
    assert_eq!(results.len(), 500);
    assert!(results.iter().all(|result| single(result).is_ok()));
    invalid(batch(&client, operations(501)).await, &["operations"]);
    assert!(batch(&client, Vec::new()).await.unwrap().is_empty());
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_does_not_fit_any_more_is_an_error_of_its_own(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let keys = [fresh_key(), fresh_key(), fresh_key(), fresh_key()];
    for key in &keys {
        client.acquire(reserve(key, "t")).await;
        let mut request = complete(key, "t", b"");
        request.result = Some(Stored { body: vec![b'x'; 1 << 20].into(), ..Default::default() });
        client.complete_with(request).await.unwrap();
    }
    let results = batch(&client, keys.iter().map(|key| reserving(key, "u")).collect()).await.unwrap();
    let (fitting, other): (Vec<_>, Vec<_>) = results.iter().map(single).partition(Result::is_ok);
    assert_eq!(fitting.len(), 2);
    for answer in other {
        refused(answer, Code::OutOfRange, "RESPONSE_TOO_LARGE");
    }
    completed(client.reserve(reserve(&keys[3], "u")).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_item_that_is_unavailable_the_later_ones_of_its_key_are_not_tried() {
    let (client, (_server, database)) = Backend::Postgres.client().await;
    let (held, free) = (fresh_key(), fresh_key());
    client.acquire(reserve(&held, "t")).await;
    let mut holder = PgConnection::connect(&database.url).await.unwrap();
    let lock = lock_record(&mut holder, &held).await;
    let operations = vec![
        completing(&held, "t", b"r"),
        reserving(&free, "t"),
        Operation::Lookup(LookupRequest { key: Some(held.clone()) }),
        completing(&free, "t", b"r"),
    ];
    let results = batch(&client, operations).await.unwrap();
    refused(single(&results[0]), Code::Unavailable, "STORE_UNAVAILABLE");
    refused(single(&results[2]), Code::Unavailable, "STORE_UNAVAILABLE");
    assert!(single(&results[1]).is_ok() && single(&results[3]).is_ok());
    assert!(single(&results[0]).unwrap_err().get_details_retry_info().is_some());
    lock.rollback().await.unwrap();
}

/// Many full Batches at once take more places than the store's queue has; they wait for each other instead.
#[tokio::test(flavor = "multi_thread")]
async fn many_batches_at_once_are_not_refused() {
    let (client, _server) = Backend::Postgres.client().await;
    let batches: Vec<_> = (0..12)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let operations = (0..500).map(|_| reserving(&fresh_key(), "t")).collect();
                batch(&client, operations).await.unwrap()
            })
        })
        .collect();
    for results in batches {
        let results = results.await.unwrap();
        assert_eq!(results.len(), 500);
        assert!(results.iter().all(|result| single(result).is_ok()));
    }
}
