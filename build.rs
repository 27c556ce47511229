//! Compiles the protocol without a `protoc` on the machine.
//!
//! Two outputs: the Rust code, and the descriptor set that server reflection answers from. The descriptor set keeps its
//! source info, so that `grpcurl describe` shows the comments of the proto.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");

    let descriptors = protox::compile(["onceward/v1/idempotency.proto", "google/rpc/error_details.proto"], ["proto"])?;
    let output = PathBuf::from(env::var("OUT_DIR")?).join("onceward_descriptor.bin");
    fs::write(output, descriptors.encode_to_vec())?;

    tonic_prost_build::configure()
        // Error details are tonic's own types, so that its helpers read and write them.
        .extern_path(".google.rpc", "::tonic_types")
        // Results are passed on without a copy.
        .bytes(".onceward.v1")
        .compile_fds(descriptors)?;
    Ok(())
}
