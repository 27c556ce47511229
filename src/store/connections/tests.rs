//! Connections that are numbers: what is lent, kept, given up and waited for.

use tokio::sync::oneshot;

use super::*;

type Counter = Connections<u32>;

fn counter(count: usize) -> Counter {
    let opened = Arc::new(AtomicUsize::new(0));
    let open: Open<u32> = Box::new(move || {
        let number = opened.fetch_add(1, Ordering::Relaxed) as u32;
        Box::pin(async move { Ok(number) })
    });
    Connections::new(count, Duration::from_secs(5), None, open)
}

async fn number(connections: &Counter) -> u32 {
    connections.run(Urgency::Reservation, |number| Box::pin(async { Ok(*number) })).await.unwrap()
}

#[tokio::test]
async fn a_connection_is_used_again() {
    let connections = counter(2);
    assert_eq!(number(&connections).await, 0);
    assert_eq!(number(&connections).await, 0);
}

#[tokio::test]
async fn an_error_that_leaves_the_connection_sound_keeps_it() {
    let connections = counter(1);
    let failed: Result<(), _> =
        connections.run(Urgency::Reservation, |_| Box::pin(async { Err(Fault::Answer(StoreError::Locked)) })).await;
    assert_eq!(failed, Err(StoreError::Locked));
    assert_eq!(number(&connections).await, 0);
}

#[tokio::test]
async fn a_broken_connection_takes_the_idle_ones_with_it() {
    let connections = counter(2);
    let (hold, held) = oneshot::channel::<()>();
    let first = connections.run(Urgency::Reservation, |number| {
        Box::pin(async move {
            let _ = held.await;
            Ok(*number)
        })
    });
    let second = async {
        let number = number(&connections).await;
        let _ = hold.send(());
        number
    };
    assert_eq!(tokio::join!(first, second), (Ok(0), 1));
    let broken: Result<(), _> =
        connections.run(Urgency::Reservation, |_| Box::pin(async { Err(Fault::Broken("gone".into())) })).await;
    assert_eq!(broken, Err(StoreError::Unavailable));
    assert_eq!(number(&connections).await, 2);
}

#[tokio::test(start_paused = true)]
async fn work_that_hangs_is_given_up_with_its_connection() {
    let connections = counter(1);
    let hung: Result<(), _> = connections.run(Urgency::Reservation, |_| Box::pin(std::future::pending())).await;
    assert_eq!(hung, Err(StoreError::Unavailable));
    assert_eq!(number(&connections).await, 1);
}

#[tokio::test]
async fn work_goes_on_when_its_caller_leaves() {
    let connections = counter(1);
    let (started, begun) = oneshot::channel();
    let (finish, may_finish) = oneshot::channel::<()>();
    let (done, finished) = oneshot::channel();
    let call = connections.run(Urgency::Reservation, |_| {
        Box::pin(async move {
            let _ = started.send(());
            let _ = may_finish.await;
            let _ = done.send(());
            Ok(())
        })
    });
    tokio::select! {
        biased;
        _ = call => unreachable!("it waits for its signal"),
        _ = begun => {}
    }
    finish.send(()).unwrap();
    finished.await.unwrap();
}

#[tokio::test]
async fn closing_waits_for_work_whose_caller_has_left() {
    let connections = counter(1);
    let (finish, may_finish) = oneshot::channel::<()>();
    let mut work = Box::pin(connections.run(Urgency::Completion, |_| {
        Box::pin(async move {
            let _ = may_finish.await;
            Ok(())
        })
    }));
    assert!(futures_util::poll!(work.as_mut()).is_pending(), "it waits for its signal");
    // From a thread that knows of no runtime.
    std::thread::scope(|scope| scope.spawn(|| drop(work)).join().unwrap());
    let mut closing = Box::pin(connections.close());
    assert!(futures_util::poll!(closing.as_mut()).is_pending(), "the work goes on");
    finish.send(()).unwrap();
    closing.await;
}

#[tokio::test]
async fn work_that_panics_fails_alone_and_takes_its_connection_with_it() {
    let connections = counter(1);
    let failed: Result<(), _> =
        connections.run(Urgency::Reservation, |_| Box::pin(async { panic!("as a fault of ours would") })).await;
    assert_eq!(failed, Err(StoreError::Unavailable));
    assert_eq!(number(&connections).await, 1);
}

#[tokio::test(start_paused = true)]
async fn completions_have_room_when_reservations_are_refused() {
    let connections = counter(1);
    let _slot = connections.slot(Urgency::Reservation).await.unwrap();
    let _places: Vec<_> = (0..QUEUE_MAX).map(|_| Place::take(&connections.0.queued, QUEUE_MAX).unwrap()).collect();
    assert!(matches!(connections.slot(Urgency::Reservation).await, Err(StoreError::Overloaded)));
    let waits = tokio::time::timeout(Duration::from_millis(10), connections.slot(Urgency::Completion)).await;
    assert!(waits.is_err(), "a completion queues");
}

#[tokio::test]
async fn where_no_more_connections_are_to_be_had_those_that_there_are_serve_all() {
    let opened = Arc::new(AtomicUsize::new(0));
    let open: Open<usize> = Box::new(move || {
        let number = opened.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move { if number < 2 { Ok(number) } else { Err("too many".into()) } })
    });
    let connections = Connections::new(8, Duration::from_secs(5), None, open);
    let calls = (0..100).map(|_| {
        connections.run(Urgency::Completion, |number: &mut usize| {
            Box::pin(async {
                tokio::task::yield_now().await;
                Ok(*number)
            })
        })
    });
    for answer in futures_util::future::join_all(calls).await {
        assert!(answer.unwrap() < 2);
    }
}

#[tokio::test]
async fn a_completion_overtakes_reservations_that_queue() {
    let connections = counter(1);
    let held = connections.slot(Urgency::Reservation).await.unwrap();
    let order = Mutex::new(Vec::new());
    let queued = async |name, urgency| {
        let _slot = connections.slot(urgency).await.unwrap();
        order.lock().unwrap().push(name);
    };
    let calls = async {
        tokio::join!(
            queued("first", Urgency::Reservation),
            queued("second", Urgency::Reservation),
            queued("completion", Urgency::Completion),
        )
    };
    tokio::join!(biased; calls, async { drop(held) });
    assert_eq!(*order.lock().unwrap(), ["completion", "first", "second"]);
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_for_a_connection_for_ever() {
    let connections = counter(1);
    let _slot = connections.slot(Urgency::Reservation).await.unwrap();
    assert!(matches!(connections.slot(Urgency::Reservation).await, Err(StoreError::Overloaded)));
    assert!(matches!(connections.slot(Urgency::Completion).await, Err(StoreError::Unavailable)));
}

#[tokio::test(start_paused = true)]
async fn while_the_database_cannot_be_reached_one_caller_tries_and_others_fail_at_once() {
    let tries = Arc::new(AtomicUsize::new(0));
    let (counted, up) = (tries.clone(), Arc::new(AtomicBool::new(false)));
    let is_up = up.clone();
    let open: Open<u32> = Box::new(move || {
        let (counted, is_up) = (counted.clone(), is_up.clone());
        Box::pin(async move {
            counted.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_secs(1)).await;
            if is_up.load(Ordering::Relaxed) { Ok(7) } else { Err("down".into()) }
        })
    });
    let connections = Connections::new(4, Duration::from_secs(5), None, open);
    let call = || connections.run(Urgency::Completion, |number: &mut u32| Box::pin(async { Ok(*number) }));
    assert_eq!(call().await, Err(StoreError::Unavailable));
    let began = tokio::time::Instant::now();
    let answers = futures_util::future::join_all((0..100).map(|_| call())).await;
    assert!(answers.into_iter().all(|answer| answer == Err(StoreError::Unavailable)));
    assert_eq!(tries.load(Ordering::Relaxed), 2);
    assert!(began.elapsed() < Duration::from_secs(2));
    up.store(true, Ordering::Relaxed);
    assert_eq!(call().await, Ok(7));
    assert_eq!(futures_util::future::join(call(), call()).await, (Ok(7), Ok(7)));
}

#[tokio::test]
async fn closing_waits_for_the_work_and_refuses_more() {
    let connections = counter(1);
    let (finish, may_finish) = oneshot::channel::<()>();
    let work = connections.run(Urgency::Completion, |number| {
        Box::pin(async move {
            let _ = may_finish.await;
            Ok(*number)
        })
    });
    let mut closing = Box::pin(connections.close());
    let waits = async {
        assert!(futures_util::poll!(closing.as_mut()).is_pending(), "work has begun");
        finish.send(()).unwrap();
        closing.await;
    };
    assert_eq!(tokio::join!(biased; work, waits).0, Ok(0));
    let refused = connections.run(Urgency::Completion, |number| Box::pin(async { Ok(*number) })).await;
    assert_eq!(refused, Err(StoreError::Unavailable));
}
