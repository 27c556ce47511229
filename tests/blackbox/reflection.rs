//! Server reflection, in both versions, with comments.

use prost::Message;
use prost_types::FileDescriptorProto;
use tokio_stream::{StreamExt, once};
use tonic_reflection::pb::{v1, v1alpha};

use crate::support::*;

const SERVICES: [&str; 3] =
    ["grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "onceward.v1.IdempotencyService"];

#[tokio::test(flavor = "multi_thread")]
async fn both_versions_list_the_services() {
    let (server, _database) = Backend::Sqlite.server().await;
    let mut client = v1::server_reflection_client::ServerReflectionClient::new(server.channel().await);
    let request = v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(v1::server_reflection_request::MessageRequest::ListServices(String::new())),
    };
    let answer = client.server_reflection_info(once(request)).await.unwrap().into_inner().next().await;
    let Some(v1::server_reflection_response::MessageResponse::ListServicesResponse(listed)) =
        answer.unwrap().unwrap().message_response
    else {
        panic!("expected services")
    };
    let names: Vec<_> = listed.service.into_iter().map(|service| service.name).collect();
    assert!(SERVICES.iter().all(|service| names.iter().any(|name| name == service)), "{names:?}");

    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(server.channel().await);
    let request = v1alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(v1alpha::server_reflection_request::MessageRequest::ListServices(String::new())),
    };
    let answer = client.server_reflection_info(once(request)).await.unwrap().into_inner().next().await;
    let Some(v1alpha::server_reflection_response::MessageResponse::ListServicesResponse(listed)) =
        answer.unwrap().unwrap().message_response
    else {
        panic!("expected services")
    };
    assert!(listed.service.iter().any(|service| service.name == "onceward.v1.IdempotencyService"));
}

async fn file(server: &Server, symbol: &str) -> FileDescriptorProto {
    use v1::{server_reflection_request::MessageRequest, server_reflection_response::MessageResponse};
    let mut client = v1::server_reflection_client::ServerReflectionClient::new(server.channel().await);
    let request = v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::FileContainingSymbol(symbol.into())),
    };
    let answer = client.server_reflection_info(once(request)).await.unwrap().into_inner().next().await;
    match answer.unwrap().unwrap().message_response {
        Some(MessageResponse::FileDescriptorResponse(files)) => {
            FileDescriptorProto::decode(&*files.file_descriptor_proto[0]).unwrap()
        }
        other => panic!("{symbol}: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reference_comes_with_the_descriptors() {
    let (server, _database) = Backend::Sqlite.server().await;
    let described = file(&server, "onceward.v1.IdempotencyService").await;
    let comments: String = described
        .source_code_info
        .unwrap()
        .location
        .into_iter()
        .filter_map(|location| location.leading_comments)
        .collect();
    assert!(comments.contains("Exactly one caller at a time acquires a key."));
    assert!(comments.contains("FINGERPRINT_MISMATCH"));
    // What error details are read with.
    file(&server, "google.rpc.ErrorInfo").await;
    file(&server, "google.rpc.RetryInfo").await;
    file(&server, "grpc.health.v1.Health").await;
}
