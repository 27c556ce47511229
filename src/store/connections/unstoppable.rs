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
///
/// It is to be polled or dropped: work that is kept without being polled keeps what it holds.
pub(super) struct Unstoppable<T: Send + 'static> {
    work: Option<BoxFuture<'static, T>>,
    /// Where it goes on. The thread that drops it need not know of any.
    runtime: Handle,
}

impl<T: Send + 'static> Unstoppable<T> {
    /// Begins with the first poll. Call it on a runtime.
    pub(super) fn new(work: impl Future<Output = T> + Send + 'static) -> Self {
        Self { work: Some(Box::pin(work)), runtime: Handle::current() }
    }
}

impl<T: Send + 'static> Future for Unstoppable<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let Some(work) = &mut self.work else { return Poll::Pending };
        let done = work.as_mut().poll(context);
        if done.is_ready() {
            self.work = None;
        }
        done
    }
}

impl<T: Send + 'static> Drop for Unstoppable<T> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            self.runtime.spawn(work);
        }
    }
}
