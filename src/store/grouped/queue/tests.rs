//! What a batch is made of, and who has to wait.

use std::sync::{Arc, Mutex};

use super::*;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(&'static str, StoreError)>>>);

struct Call {
    name: &'static str,
    key: Key,
    bytes: usize,
    follows: bool,
    abandoned: bool,
    refused: Log,
}

impl Item for Call {
    const EXCLUSIVE: bool = true;

    fn key(&self) -> &Key {
        &self.key
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn follows(&self) -> bool {
        self.follows
    }
    fn is_abandoned(&self) -> bool {
        self.abandoned
    }
    fn refuse(self, error: StoreError) {
        self.refused.0.lock().unwrap().push((self.name, error));
    }
}

struct World {
    queue: Queue<Call>,
    refused: Log,
}

impl World {
    fn new(items: usize, bytes: usize) -> Self {
        Self { queue: Queue::new(Bounds { items, bytes }), refused: Log::default() }
    }

    fn call(&self, name: &'static str, key: &str) -> Call {
        let key = Key::new("n", "", key).unwrap();
        Call { name, key, bytes: 1, follows: false, abandoned: false, refused: self.refused.clone() }
    }

    fn push(&self, urgency: Urgency, call: Call) {
        self.queue.push(urgency, call);
    }

    /// The next batch, done at once.
    async fn next(&self) -> Vec<&'static str> {
        let batch = self.queue.next().await.unwrap();
        self.queue.release(&batch.iter().map(|group| group.leader.key.clone()).collect::<Vec<_>>());
        batch.into_iter().map(|group| group.leader.name).collect()
    }

    fn refused(&self) -> Vec<(&'static str, StoreError)> {
        self.refused.0.lock().unwrap().clone()
    }
}

use Urgency::{Completion, Reservation};

#[tokio::test]
async fn a_batch_is_what_waits_up_to_its_bounds() {
    let world = World::new(2, 100);
    for (name, key) in [("1", "a"), ("2", "b"), ("3", "c")] {
        world.push(Reservation, world.call(name, key));
    }
    assert_eq!(world.next().await, ["1", "2"]);
    assert_eq!(world.next().await, ["3"]);
}

#[tokio::test]
async fn a_batch_is_bounded_in_bytes_and_what_is_larger_goes_alone() {
    let world = World::new(10, 100);
    for (name, key, bytes) in [("1", "a", 60), ("2", "b", 40), ("3", "c", 200), ("4", "d", 1)] {
        world.push(Completion, Call { bytes, ..world.call(name, key) });
    }
    assert_eq!(world.next().await, ["1", "2"]);
    assert_eq!(world.next().await, ["3"]);
    assert_eq!(world.next().await, ["4"]);
}

#[tokio::test]
async fn a_key_is_once_in_a_batch_and_its_items_stay_in_order() {
    let world = World::new(10, 100);
    for (name, key) in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a")] {
        world.push(Completion, world.call(name, key));
    }
    assert_eq!(world.next().await, ["a1", "b1"]);
    assert_eq!(world.next().await, ["a2"]);
    assert_eq!(world.next().await, ["a3"]);
}

#[tokio::test]
async fn a_crowd_at_one_key_keeps_no_other_key_waiting() {
    let world = World::new(10, 100);
    for _ in 0..QUEUE_ITEMS_MAX {
        world.push(Completion, world.call("crowd", "hot"));
    }
    assert_eq!(world.refused().len(), QUEUE_ITEMS_MAX - KEY_ITEMS_MAX, "there is room left for others");
    for (name, key) in [("b", "b"), ("c", "c")] {
        world.push(Completion, world.call(name, key));
    }
    assert_eq!(world.next().await, ["crowd", "b", "c"]);
    assert_eq!(world.next().await, ["crowd"]);
    world.push(Completion, world.call("d", "d"));
    assert_eq!(world.next().await, ["crowd", "d"]);
}

#[tokio::test]
async fn a_key_is_in_one_batch_in_flight_at_a_time() {
    let world = World::new(10, 100);
    world.push(Completion, world.call("a1", "a"));
    let first = world.queue.next().await.unwrap();
    world.push(Completion, world.call("a2", "a"));
    world.push(Completion, world.call("b1", "b"));
    assert_eq!(world.next().await, ["b1"]);
    let queue = &world.queue;
    let (second, ()) = tokio::join!(queue.next(), async {
        yield_now().await;
        queue.release(&[first[0].leader.key.clone()]);
    });
    assert_eq!(second.unwrap()[0].leader.name, "a2");
}

#[tokio::test]
async fn what_waits_for_a_key_in_flight_keeps_no_other_key_waiting() {
    let world = World::new(10, 100);
    world.push(Completion, world.call("a1", "a"));
    let _in_flight = world.queue.next().await.unwrap();
    world.push(Completion, world.call("a2", "a"));
    let (next, ()) = tokio::join!(world.next(), async {
        yield_now().await;
        world.push(Completion, world.call("b1", "b"));
    });
    assert_eq!(next, ["b1"]);
}

#[tokio::test]
async fn large_completions_leave_bytes_for_reservations() {
    let world = World::new(100, 100);
    let keys = ["a", "b", "c", "d", "e"];
    for key in keys {
        world.push(Completion, Call { bytes: 25, ..world.call("completion", key) });
    }
    world.push(Reservation, Call { bytes: 20, ..world.call("reservation", "r") });
    assert_eq!(world.next().await, ["completion", "completion", "completion", "reservation"]);
}

#[tokio::test]
async fn followers_go_with_the_first_of_their_key() {
    let world = World::new(10, 100);
    world.push(Completion, world.call("a1", "a"));
    for name in ["a2", "a3"] {
        world.push(Reservation, Call { follows: true, ..world.call(name, "a") });
    }
    let batch = world.queue.next().await.unwrap();
    assert_eq!(batch.len(), 1);
    assert_eq!(batch[0].followers.iter().map(|call| call.name).collect::<Vec<_>>(), ["a2", "a3"]);
}

#[tokio::test]
async fn completions_go_first_and_leave_room_for_reservations() {
    let world = World::new(4, 100);
    let keys = ["a", "b", "c", "d", "e", "f", "g", "h"];
    for key in &keys[..2] {
        world.push(Reservation, world.call("reservation", key));
    }
    for key in &keys[2..] {
        world.push(Completion, world.call("completion", key));
    }
    let three = ["completion", "completion", "completion"];
    for _ in 0..2 {
        let batch = world.next().await;
        assert_eq!((&batch[..3], batch[3]), (&three[..], "reservation"));
    }
}

#[tokio::test]
async fn those_whose_caller_has_left_are_left_out() {
    let world = World::new(10, 100);
    world.push(Reservation, Call { abandoned: true, ..world.call("left", "a") });
    world.push(Reservation, world.call("stays", "b"));
    assert_eq!(world.next().await, ["stays"]);
    assert_eq!(world.refused(), []);
}

#[tokio::test]
async fn a_full_queue_refuses_at_once_and_has_room_for_completions() {
    let world = World::new(10, 100);
    for n in 0..QUEUE_ITEMS_MAX {
        world.push(Reservation, world.call("fits", if n % 2 == 0 { "a" } else { "d" }));
    }
    world.push(Reservation, world.call("too much", "b"));
    world.push(Completion, world.call("completion", "c"));
    assert_eq!(world.refused(), [("too much", StoreError::Overloaded)]);
    assert_eq!(world.next().await, ["completion", "fits", "fits"]);
}

#[tokio::test]
async fn a_queue_is_bounded_in_bytes() {
    let world = World::new(10, QUEUE_BYTES_MAX);
    let large = |name, key| Call { bytes: QUEUE_BYTES_MAX / 2, ..world.call(name, key) };
    for (name, key) in [("1", "a"), ("2", "b"), ("3", "c")] {
        world.push(Completion, large(name, key));
    }
    assert_eq!(world.refused(), [("3", StoreError::Overloaded)]);
    assert_eq!(world.next().await, ["1", "2"]);
    world.push(Completion, large("4", "d"));
    assert_eq!(world.next().await, ["4"]);
}

#[tokio::test(start_paused = true)]
async fn what_waits_too_long_is_sent_away() {
    let world = World::new(10, 100);
    world.push(Reservation, world.call("reservation", "a"));
    world.push(Completion, world.call("completion", "b"));
    tokio::time::advance(QUEUE_TIMEOUT + Duration::from_millis(1)).await;
    world.push(Reservation, world.call("fresh", "c"));
    assert_eq!(world.next().await, ["fresh"]);
    let late = [("completion", StoreError::Unavailable), ("reservation", StoreError::Overloaded)];
    assert_eq!(world.refused(), late);
}

#[tokio::test]
async fn a_closed_queue_is_drained_and_refuses_what_comes() {
    let world = World::new(10, 100);
    world.push(Reservation, world.call("before", "a"));
    world.queue.close();
    world.push(Reservation, world.call("after", "b"));
    assert_eq!(world.next().await, ["before"]);
    assert!(world.queue.next().await.is_none());
    assert_eq!(world.refused(), [("after", StoreError::Unavailable)]);
}

#[tokio::test]
async fn an_aborted_queue_answers_everybody_and_lets_every_worker_go() {
    let world = World::new(10, 100);
    world.push(Reservation, world.call("in flight", "a"));
    let _never_released = world.queue.next().await.unwrap();
    world.push(Completion, world.call("waits", "a"));
    let (next, ()) = tokio::join!(world.queue.next(), async {
        yield_now().await;
        world.queue.abort();
    });
    assert!(next.is_none());
    assert_eq!(world.refused(), [("waits", StoreError::Unavailable)]);
}

#[tokio::test]
async fn whoever_takes_a_batch_wakes_the_next_for_what_is_left() {
    let world = Arc::new(World::new(1, 100));
    let takers: Vec<_> = (0..3)
        .map(|_| {
            let world = world.clone();
            tokio::spawn(async move { world.next().await })
        })
        .collect();
    tokio::task::yield_now().await;
    for (name, key) in [("1", "a"), ("2", "b"), ("3", "c")] {
        world.push(Reservation, world.call(name, key));
    }
    for taker in takers {
        assert_eq!(taker.await.unwrap().len(), 1);
    }
}
