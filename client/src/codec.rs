//! [`Codec`]: values as the bytes of a result.

use prost::Message;
use serde::{Serialize, de::DeserializeOwned};

/// How values of a type become the body of a result, and values again.
pub trait Codec<T> {
    /// The bytes of a value.
    ///
    /// # Errors
    ///
    /// The value cannot be written in this form.
    fn encode(value: &T) -> Result<Vec<u8>, CodecError>;

    /// The value of some bytes.
    ///
    /// # Errors
    ///
    /// The bytes are no such value: most often they were written by another version of the program.
    fn decode(bytes: &[u8]) -> Result<T, CodecError>;
}

/// A value cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[error("a value cannot be written or read: {0}")]
pub struct CodecError(#[source] Box<dyn std::error::Error + Send + Sync>);

impl CodecError {
    /// For codecs of your own.
    pub fn new(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(source.into())
    }
}

/// Values that serde knows, as JSON.
#[derive(Clone, Copy, Debug)]
pub struct Json;

impl<T: Serialize + DeserializeOwned> Codec<T> for Json {
    fn encode(value: &T) -> Result<Vec<u8>, CodecError> {
        serde_json::to_vec(value).map_err(CodecError::new)
    }

    fn decode(bytes: &[u8]) -> Result<T, CodecError> {
        serde_json::from_slice(bytes).map_err(CodecError::new)
    }
}

/// Messages of protocol buffers.
#[derive(Clone, Copy, Debug)]
pub struct Prost;

impl<T: Message + Default> Codec<T> for Prost {
    fn encode(value: &T) -> Result<Vec<u8>, CodecError> {
        Ok(value.encode_to_vec())
    }

    fn decode(bytes: &[u8]) -> Result<T, CodecError> {
        T::decode(bytes).map_err(CodecError::new)
    }
}
