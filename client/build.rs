//! Compiles the protocol without a `protoc` on the machine.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");

    tonic_prost_build::configure()
        .build_server(false)
        .extern_path(".google.rpc", "::tonic_types")
        // Results are passed on without a copy.
        .bytes(".onceward.v1")
        .compile_fds(protox::compile(["onceward/v1/idempotency.proto"], ["proto"])?)?;
    Ok(())
}
