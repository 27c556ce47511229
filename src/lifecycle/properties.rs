//! The invariants, over random histories: several callers, both policies, every side of each lock's end and expiry.

use std::{collections::HashMap, time::Duration};

use proptest::prelude::*;

use super::*;

/// What happens next in a history.
#[derive(Clone, Debug)]
enum Event {
    Reserve { caller: u8, hold: bool, fingerprint: Option<u8> },
    Finish { caller: u8, status: Status },
    Renew { caller: u8 },
    Resolve { status: Status, force: bool, stale: bool },
    Pass { micros: u64 },
    Sweep,
}

const LOCK: Duration = Duration::from_micros(100);
const RETENTION: Duration = Duration::from_micros(300);

fn statuses() -> impl Strategy<Value = Status> {
    prop_oneof![Just(Status::Completed), Just(Status::Failed), Just(Status::FailedRetryable)]
}

fn events() -> impl Strategy<Value = Event> {
    let caller = || 0..4u8;
    prop_oneof![
        6 => (caller(), prop::bool::weighted(0.2), prop::option::weighted(0.2, 0..2u8))
            .prop_map(|(caller, hold, fingerprint)| Event::Reserve { caller, hold, fingerprint }),
        3 => (caller(), statuses()).prop_map(|(caller, status)| Event::Finish { caller, status }),
        2 => caller().prop_map(|caller| Event::Renew { caller }),
        1 => (statuses(), any::<bool>(), any::<bool>())
            .prop_map(|(status, force, stale)| Event::Resolve { status, force, stale }),
        4 => prop_oneof![Just(1), Just(50), Just(99), Just(100), Just(101), Just(300), Just(401)]
            .prop_map(|micros| Event::Pass { micros }),
        1 => Just(Event::Sweep),
    ]
}

/// One key, its callers, and what they have been told.
struct World {
    key: Key,
    now: Timestamp,
    record: Option<Record>,
    /// Who may believe to hold the key, and until when by the last answer.
    leases: HashMap<Token, Timestamp>,
    highest_fence: i64,
    /// Who may have acted while the record was to be held, until its fate is known.
    unresolved_hold: Option<Token>,
}

impl World {
    fn new() -> Self {
        Self {
            key: Key::new("n", "", "k").unwrap(),
            now: Timestamp(1_000_000),
            record: None,
            leases: HashMap::new(),
            highest_fence: 0,
            unresolved_hold: None,
        }
    }

    fn token(caller: u8) -> Token {
        Token::new(&format!("token-{caller}")).unwrap()
    }

    fn reservation(caller: u8, hold: bool, fingerprint: Option<u8>) -> Reservation {
        Reservation {
            token: Self::token(caller),
            fingerprint: fingerprint.map(|n| Fingerprint::new(&format!("x:{n:02x}")).unwrap()),
            lock_ttl: LOCK,
            retention: RETENTION,
            owner: None,
            on_expiry: if hold { OnExpiry::Hold } else { OnExpiry::Retry },
            origin: None,
        }
    }

    fn ending(status: Status, resolved: bool, code: i32) -> Finish {
        let result = (status != Status::FailedRetryable).then(|| StoredResult { code, ..StoredResult::default() });
        Finish { status, resolved, result, retention: None, checkpoint: None }
    }

    fn write(&mut self, write: &Write) {
        let before = self.record.clone();
        let after = write.apply(before.as_ref(), self.now).expect("the rules write what applies");
        check_transition(before.as_ref(), &after, self.now);
        self.record = Some(after);
    }

    fn step(&mut self, event: &Event, code: i32) {
        match event {
            Event::Reserve { caller, hold, fingerprint } => {
                self.reserve(&Self::reservation(*caller, *hold, *fingerprint));
            }
            Event::Finish { caller, status } => self.finish(&Self::token(*caller), *status, code),
            Event::Renew { caller } => self.renew(&Self::token(*caller)),
            Event::Resolve { status, force, stale } => self.resolve(*status, *force, *stale, code),
            Event::Pass { micros } => self.now = Timestamp(self.now.0 + *micros as i64),
            Event::Sweep => {
                if self.record.as_ref().is_some_and(|record| record.is_expired(self.now)) {
                    self.record = None;
                }
            }
        }
    }

    fn reserve(&mut self, request: &Reservation) {
        let before = self.record.clone();
        match reserve(&self.key, request, before.as_ref(), self.now) {
            Ok(Step::Write(write)) => {
                self.write(&write);
                let record = self.record.clone().unwrap();
                let same = before.as_ref().is_some_and(|b| b.token == record.token && b.fence == record.fence);
                if !same {
                    assert!(record.fence > self.highest_fence, "each new holder has a higher fence");
                    self.highest_fence = record.fence;
                    for (token, until) in &self.leases {
                        assert!(*until <= self.now || *token == request.token, "one live holder at a time");
                    }
                    assert!(self.unresolved_hold.is_none(), "nobody executes after a lock that ran out under hold");
                }
                self.leases.insert(request.token.clone(), record.locked_until);
                if record.on_expiry == OnExpiry::Hold {
                    self.unresolved_hold = Some(request.token.clone());
                }
                // Asked again, it is the same reservation.
                let again = reserve(&self.key, request, Some(&record), self.now);
                let Ok(Step::Write(again)) = again else { panic!("a repeated Reserve acquires again: {again:?}") };
                let again = again.apply(Some(&record), self.now).unwrap();
                assert_eq!((again.fence, again.attempt), (record.fence, record.attempt));
            }
            Ok(Step::Answer(answer)) => {
                let record = before.unwrap();
                match answer {
                    Reserved::Acquired(_) => panic!("an acquisition is always a write"),
                    Reserved::InProgress(held) => {
                        assert!(record.is_live(self.now));
                        assert_eq!(held.locked_until.since(self.now), held.left);
                    }
                    Reserved::InDoubt(_) => assert!(record.status == Status::InProgress && !record.is_live(self.now)),
                    Reserved::Completed(finished) | Reserved::Failed(finished) => {
                        assert_eq!(Some(finished.result), record.result, "a replay is the stored result");
                    }
                }
            }
            Err(_) => {}
        }
    }

    fn finish(&mut self, token: &Token, status: Status, code: i32) {
        let ending = Self::ending(status, false, code);
        match finish(&self.key, token, &ending, self.record.as_ref(), self.now) {
            Ok(Step::Write(write)) => {
                self.write(&write);
                self.settled(token);
                let again = finish(&self.key, token, &ending, self.record.as_ref(), self.now);
                assert!(matches!(again, Ok(Step::Answer(_))), "a repeated finish is done again");
            }
            Ok(Step::Answer(_)) => self.settled(token),
            Err(_) => {}
        }
    }

    fn renew(&mut self, token: &Token) {
        let extension = Extension { lock_ttl: None, on_expiry: OnExpiry::Retry, checkpoint: None };
        if let Ok(Step::Write(write)) = renew(&self.key, token, &extension, self.record.as_ref(), self.now) {
            self.write(&write);
            let until = self.record.as_ref().unwrap().locked_until;
            assert!(until >= self.now.after(LOCK));
            self.leases.insert(token.clone(), until);
        }
    }

    fn resolve(&mut self, status: Status, force: bool, stale: bool, code: i32) {
        let Some(record) = self.record.clone() else { return };
        let fence = if stale { record.fence - 1 } else { record.fence };
        if let Ok(Step::Write(write)) =
            resolve(fence, force, &Self::ending(status, true, code), Some(&record), self.now)
        {
            assert!(!stale, "a resolution names the current reservation");
            self.write(&write);
            // Whoever resolves asserts that the holder is gone.
            self.settled(&record.token);
        }
    }

    fn settled(&mut self, token: &Token) {
        self.leases.remove(token);
        if self.unresolved_hold.as_ref() == Some(token) {
            self.unresolved_hold = None;
        }
    }
}

/// No transition out of the table.
fn check_transition(before: Option<&Record>, after: &Record, now: Timestamp) {
    let Some(before) = before else {
        assert_eq!((after.status, after.attempt), (Status::InProgress, 1));
        return;
    };
    assert!(after.version > before.version, "each write has a version of its own");
    assert!(after.fence >= before.fence);
    let expired = before.is_expired(now);
    match (before.status, after.status) {
        (Status::InProgress, Status::InProgress) if after.token == before.token && after.fence == before.fence => {
            assert!(after.locked_until >= before.locked_until, "a lock never gets shorter");
        }
        (Status::InProgress, Status::InProgress) => {
            assert!(!before.is_live(now), "a live lock is not taken over");
            assert!(before.on_expiry == OnExpiry::Retry, "what is to be held is not taken over");
            assert_eq!(after.attempt, if expired { 1 } else { before.attempt + 1 });
        }
        (Status::InProgress, _) => assert_eq!(after.fence, before.fence),
        (Status::FailedRetryable, Status::InProgress) => {
            assert_eq!(after.attempt, if expired { 1 } else { before.attempt + 1 });
        }
        (Status::Completed | Status::Failed, Status::InProgress) => assert!(expired, "a final result is final"),
        (from, to) => panic!("no rule goes from {from:?} to {to:?}"),
    }
    if !expired {
        assert!(before.on_expiry.or(after.on_expiry) == after.on_expiry, "hold once is hold for ever");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn histories_keep_the_invariants(history in prop::collection::vec(events(), 1..60)) {
        let mut world = World::new();
        for (code, event) in history.iter().enumerate() {
            world.step(event, code as i32);
        }
    }

    /// No event changes a final result before it expires.
    #[test]
    fn a_finished_result_never_changes(history in prop::collection::vec(events(), 1..60)) {
        let mut world = World::new();
        for (code, event) in history.iter().enumerate() {
            let before = world.record.clone();
            world.step(event, code as i32);
            if let Some(before) = before
                && matches!(before.status, Status::Completed | Status::Failed)
                && !before.is_expired(world.now)
            {
                prop_assert_eq!(world.record.as_ref(), Some(&before));
            }
        }
    }
}
