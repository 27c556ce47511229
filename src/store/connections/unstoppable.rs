//! [`Unstoppable`]: work that goes on to its end without its caller.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;

/// Work that is done in its caller's task as long as the caller stays, and else in a task of its own.
///
/// A task for each piece of work would do as well, but the work would have to wait for that task's turn, and its caller for
/// another one, each behind whatever else is ready: a millisecond or two under load, in which the database has nothing to do.
pub(super) struct Unstoppable<T: Send + 'static>(Option<BoxFuture<'static, T>>);

impl<T: Send + 'static> Unstoppable<T> {
    /// Begins with the first poll.
    pub(super) fn new(work: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Some(Box::pin(work)))
    }
}

impl<T: Send + 'static> Future for Unstoppable<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Some(work) = &mut self.0 else { return Poll::Pending };
        let done = work.as_mut().poll(context);
        if done.is_ready() {
            self.0 = None;
        }
        done
    }
}

impl<T: Send + 'static> Drop for Unstoppable<T> {
    fn drop(&mut self) {
        // Where there is no runtime any more, no task would go on either.
        if let (Some(work), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(work);
        }
    }
}
