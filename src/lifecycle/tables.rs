//! Every row of the rule tables, as one assertion each. A row that is reached by mistake fails its neighbour's test.

use std::time::Duration;

use super::*;
use crate::{
    record::EarlierTokens,
    write::{Checkpoint, NextReservation},
};

const SECOND: Duration = Duration::from_secs(1);
const LOCK: Duration = Duration::from_secs(10);
const RETENTION: Duration = Duration::from_secs(100);
const START: Timestamp = Timestamp(1_000_000_000);

fn key() -> Key {
    Key::new("payments.charge", "ann", "order-1").unwrap()
}

fn token(name: &str) -> Token {
    Token::new(name).unwrap()
}

fn reservation(name: &str) -> Reservation {
    Reservation {
        token: token(name),
        fingerprint: None,
        lock_ttl: LOCK,
        retention: RETENTION,
        owner: None,
        on_expiry: OnExpiry::Retry,
        origin: None,
    }
}

fn hold(name: &str) -> Reservation {
    Reservation { on_expiry: OnExpiry::Hold, ..reservation(name) }
}

fn printed(name: &str, fingerprint: &str) -> Reservation {
    Reservation { fingerprint: Some(Fingerprint::new(fingerprint).unwrap()), ..reservation(name) }
}

fn ending(status: Status) -> Finish {
    let is_final = status != Status::FailedRetryable;
    let result = is_final.then(|| StoredResult { code: 7, ..StoredResult::default() });
    Finish { status, resolved: false, result, retention: None, checkpoint: None }
}

fn extension() -> Extension {
    Extension { lock_ttl: None, on_expiry: OnExpiry::Retry, checkpoint: None }
}

fn inserted(request: &Reservation) -> Record {
    insert(&key(), request).apply(None, START).unwrap()
}

fn finished_as(status: Status) -> Record {
    let record = inserted(&reservation("holder"));
    finish_as_holder(&key(), &token("holder"), &ending(status)).apply(Some(&record), START.after(SECOND)).unwrap()
}

fn resolved_as(status: Status) -> Record {
    Record { resolved: true, ..finished_as(status) }
}

/// A record whose second attempt is held by `second`.
fn taken_over() -> Record {
    let first = inserted(&reservation("first"));
    written(reserve(&key(), &reservation("second"), Some(&first), AFTER_LOCK), Some(&first), AFTER_LOCK)
}

const DURING_LOCK: Timestamp = Timestamp(START.0 + 9_000_000);
const AFTER_LOCK: Timestamp = Timestamp(START.0 + 10_000_000);
const AFTER_EXPIRY: Timestamp = Timestamp(START.0 + 110_000_000);
/// After the lock of [`taken_over`] is over too.
const AFTER_SECOND_LOCK: Timestamp = Timestamp(START.0 + 20_000_000);

fn written<A: std::fmt::Debug>(step: Result<Step<A>, Refusal>, record: Option<&Record>, now: Timestamp) -> Record {
    match step.unwrap() {
        Step::Write(write) => write.apply(record, now).unwrap(),
        Step::Answer(answer) => panic!("expected a write, got {answer:?}"),
    }
}

fn answered<A: std::fmt::Debug>(step: Result<Step<A>, Refusal>) -> A {
    match step.unwrap() {
        Step::Answer(answer) => answer,
        Step::Write(write) => panic!("expected an answer, got {write:?}"),
    }
}

fn reserve_on(record: &Record, request: &Reservation, now: Timestamp) -> Result<Step<Reserved>, Refusal> {
    reserve(&key(), request, Some(record), now)
}

mod reserving {
    use super::*;

    #[test]
    fn nothing_stored_is_a_new_record() {
        let record = written(reserve(&key(), &reservation("a"), None, START), None, START);
        assert_eq!((record.attempt, record.fence, record.version), (1, START.0, START.0));
        assert_eq!(record.locked_until, START.after(LOCK));
        assert_eq!(record.expires_at, Some(START.after(LOCK + RETENTION)));
    }

    #[test]
    fn an_expired_record_gives_way_to_a_new_one_with_a_higher_fence() {
        for status in [Status::Completed, Status::Failed, Status::FailedRetryable] {
            let old = Record { fence: i64::MAX - 10, checkpoint: Some("kept?".into()), ..finished_as(status) };
            let request = printed("holder", "x:01");
            let new = written(reserve_on(&old, &request, AFTER_EXPIRY), Some(&old), AFTER_EXPIRY);
            assert_eq!((new.attempt, new.fence), (1, old.fence + 1));
            assert_eq!((new.created_at, &new.checkpoint, &new.result), (AFTER_EXPIRY, &None, &None));
            assert_eq!(new.earlier_tokens, EarlierTokens::default());
            assert!(new.version > old.version);
        }
        let abandoned = inserted(&reservation("holder"));
        let new = written(reserve_on(&abandoned, &reservation("holder"), AFTER_EXPIRY), Some(&abandoned), AFTER_EXPIRY);
        assert_eq!(new.attempt, 1, "being the same reservation ends with the record");
    }

    #[test]
    fn another_fingerprint_is_refused_in_every_state() {
        let held = inserted(&printed("a", "x:01"));
        let completed =
            finish_as_holder(&key(), &token("a"), &ending(Status::Completed)).apply(Some(&held), DURING_LOCK).unwrap();
        let retryable = finish_as_holder(&key(), &token("a"), &ending(Status::FailedRetryable))
            .apply(Some(&held), DURING_LOCK)
            .unwrap();
        for (record, now) in
            [(&held, DURING_LOCK), (&held, AFTER_LOCK), (&completed, AFTER_LOCK), (&retryable, AFTER_LOCK)]
        {
            for name in ["a", "b"] {
                let refused = reserve_on(record, &printed(name, "x:02"), now);
                assert_eq!(refused, Err(Refusal::FingerprintMismatch));
            }
            assert_ne!(reserve_on(record, &printed("b", "y:02"), now), Err(Refusal::FingerprintMismatch));
            assert_ne!(reserve_on(record, &reservation("b"), now), Err(Refusal::FingerprintMismatch));
        }
    }

    #[test]
    fn the_same_token_is_the_same_reservation() {
        let record = inserted(&reservation("a"));
        for now in [DURING_LOCK, AFTER_LOCK] {
            let again = written(reserve_on(&record, &reservation("a"), now), Some(&record), now);
            assert_eq!((again.fence, again.attempt), (record.fence, record.attempt));
            assert_eq!(again.locked_until, now.after(LOCK));
        }
        let shorter = Reservation { lock_ttl: SECOND, owner: Some(Owner::new("other").unwrap()), ..reservation("a") };
        let again = written(reserve_on(&record, &shorter, START), Some(&record), START);
        assert_eq!(again.locked_until, record.locked_until, "a lock never gets shorter");
        assert_eq!((again.owner, again.lock_ttl), (None, LOCK), "nothing else changes");
        let again = written(reserve_on(&record, &hold("a"), AFTER_LOCK), Some(&record), AFTER_LOCK);
        assert_eq!((again.on_expiry, again.expires_at), (OnExpiry::Hold, None));
    }

    #[test]
    fn a_live_lock_is_in_progress_for_everybody_else() {
        let record = inserted(&reservation("a"));
        let answer = answered(reserve_on(&record, &reservation("b"), DURING_LOCK));
        assert!(matches!(answer, Reserved::InProgress(held) if held.left == SECOND && held.attempt == 1));
        let earlier = taken_over();
        let answer = answered(reserve_on(&earlier, &reservation("first"), AFTER_LOCK));
        assert!(matches!(answer, Reserved::InProgress(_)), "also for an earlier holder");
    }

    #[test]
    fn a_lock_that_ran_out_under_hold_is_in_doubt_also_for_its_holder() {
        let held = inserted(&hold("a"));
        for name in ["a", "b"] {
            let answer = answered(reserve_on(&held, &reservation(name), AFTER_LOCK));
            assert!(matches!(answer, Reserved::InDoubt(record) if record.fence == held.fence));
        }
        let asked = inserted(&reservation("a"));
        assert!(matches!(answered(reserve_on(&asked, &hold("b"), AFTER_LOCK)), Reserved::InDoubt(_)));
        let years = AFTER_EXPIRY.after(Duration::from_secs(1 << 30));
        assert!(
            matches!(answered(reserve_on(&held, &reservation("b"), years)), Reserved::InDoubt(_)),
            "it never expires"
        );
    }

    #[test]
    fn a_late_copy_of_an_earlier_reserve_starts_nothing() {
        let record = taken_over();
        let late = reserve_on(&record, &reservation("first"), AFTER_SECOND_LOCK);
        assert_eq!(late, Err(Refusal::LeaseLost));
        let failed = Finish { status: Status::FailedRetryable, ..ending(Status::FailedRetryable) };
        let record = finish_as_holder(&key(), &token("second"), &failed).apply(Some(&record), AFTER_LOCK).unwrap();
        assert_eq!(reserve_on(&record, &reservation("first"), AFTER_LOCK), Err(Refusal::LeaseLost));
        assert_eq!(reserve_on(&record, &reservation("second"), AFTER_LOCK), Err(Refusal::AlreadyFinished));
    }

    #[test]
    fn a_lock_that_ran_out_is_taken_over_with_its_checkpoint() {
        let record = Record {
            checkpoint: Some("page 3".into()),
            checkpoint_sequence: Some(3),
            fingerprint: Some(Fingerprint::new("x:01").unwrap()),
            ..inserted(&reservation("a"))
        };
        let request = Reservation { lock_ttl: SECOND, retention: SECOND, ..printed("b", "y:02") };
        let next = written(reserve_on(&record, &request, AFTER_LOCK), Some(&record), AFTER_LOCK);
        assert_eq!((next.attempt, &next.token), (2, &token("b")));
        assert!(next.fence > record.fence);
        assert_eq!((&next.checkpoint, next.checkpoint_sequence), (&record.checkpoint, None));
        assert_eq!((next.lock_ttl, next.retention), (SECOND, SECOND));
        assert_eq!(next.fingerprint, record.fingerprint, "the stored fingerprint stays");
        assert_eq!(next.created_at, record.created_at);
        assert!(next.earlier_tokens.contains(&token("a")));
    }

    #[test]
    fn a_final_result_is_replayed_to_everybody() {
        for name in ["holder", "other"] {
            let completed = answered(reserve_on(&finished_as(Status::Completed), &reservation(name), AFTER_LOCK));
            assert!(matches!(completed, Reserved::Completed(finished) if finished.result.code == 7));
            let failed = answered(reserve_on(&finished_as(Status::Failed), &reservation(name), AFTER_LOCK));
            assert!(matches!(failed, Reserved::Failed(finished) if finished.result.code == 7));
        }
    }

    #[test]
    fn a_retryable_failure_is_the_next_attempt_of_anybody_but_its_holder() {
        let record = finished_as(Status::FailedRetryable);
        let next = written(reserve_on(&record, &hold("other"), AFTER_LOCK), Some(&record), AFTER_LOCK);
        assert_eq!((next.attempt, next.status, next.finished_at), (2, Status::InProgress, None));
        assert_eq!(next.on_expiry, OnExpiry::Hold);
        assert_eq!(reserve_on(&record, &reservation("holder"), AFTER_LOCK), Err(Refusal::AlreadyFinished));
    }

    #[test]
    fn hold_once_is_hold_for_ever() {
        let held = inserted(&hold("a"));
        let failed = finish_as_holder(&key(), &token("a"), &ending(Status::FailedRetryable))
            .apply(Some(&held), AFTER_LOCK)
            .unwrap();
        let next = written(reserve_on(&failed, &reservation("b"), AFTER_LOCK), Some(&failed), AFTER_LOCK);
        assert_eq!((next.on_expiry, next.expires_at), (OnExpiry::Hold, None));
    }
}

mod holding {
    use super::*;

    const VERBS: [Status; 3] = [Status::Completed, Status::Failed, Status::FailedRetryable];

    fn finish_on(
        record: Option<&Record>,
        name: &str,
        status: Status,
        now: Timestamp,
    ) -> Result<Step<Timestamp>, Refusal> {
        finish(&key(), &token(name), &ending(status), record, now)
    }

    fn renew_on(record: Option<&Record>, name: &str, now: Timestamp) -> Result<Step<Infallible>, Refusal> {
        renew(&key(), &token(name), &extension(), record, now)
    }

    #[test]
    fn nothing_stored_is_not_found() {
        assert_eq!(renew_on(None, "a", START), Err(Refusal::KeyNotFound));
        assert_eq!(lookup(None, START), Err(Refusal::KeyNotFound));
        for status in VERBS {
            assert_eq!(finish_on(None, "a", status, START), Err(Refusal::KeyNotFound));
            let finished = finished_as(status);
            assert_eq!(finish_on(Some(&finished), "holder", status, AFTER_EXPIRY), Err(Refusal::KeyNotFound));
            assert_eq!(renew_on(Some(&finished), "holder", AFTER_EXPIRY), Err(Refusal::KeyNotFound));
            assert_eq!(lookup(Some(&finished), AFTER_EXPIRY), Err(Refusal::KeyNotFound));
        }
    }

    #[test]
    fn the_holder_may_be_as_late_as_the_record_lives() {
        for record in [inserted(&reservation("a")), inserted(&hold("a"))] {
            for now in [DURING_LOCK, AFTER_LOCK, AFTER_EXPIRY] {
                for status in VERBS {
                    let finished = written(finish_on(Some(&record), "a", status, now), Some(&record), now);
                    assert_eq!((finished.status, finished.finished_at), (status, Some(now)));
                    assert_eq!(finished.expires_at, Some(now.after(RETENTION)));
                }
                let renewed = written(renew_on(Some(&record), "a", now), Some(&record), now);
                assert_eq!(renewed.locked_until, now.after(LOCK));
                assert!(lookup(Some(&record), now).is_ok());
            }
        }
    }

    #[test]
    fn the_same_end_again_is_done_again_and_the_first_result_stands() {
        for status in VERBS {
            let record = finished_as(status);
            assert_eq!(answered(finish_on(Some(&record), "holder", status, AFTER_LOCK)), record.expires_at.unwrap());
        }
    }

    #[test]
    fn another_end_is_refused() {
        for status in VERBS {
            let record = finished_as(status);
            for other in VERBS.into_iter().filter(|other| *other != status) {
                assert_eq!(finish_on(Some(&record), "holder", other, AFTER_LOCK), Err(Refusal::AlreadyFinished));
            }
            assert_eq!(renew_on(Some(&record), "holder", AFTER_LOCK), Err(Refusal::AlreadyFinished));
        }
    }

    #[test]
    fn what_another_holds_or_finished_or_resolved_is_lost() {
        let mut records = vec![inserted(&reservation("holder")), taken_over()];
        records.extend(VERBS.map(finished_as));
        for record in &records {
            for status in VERBS {
                assert_eq!(finish_on(Some(record), "first", status, AFTER_LOCK), Err(Refusal::LeaseLost));
            }
            assert_eq!(renew_on(Some(record), "first", AFTER_LOCK), Err(Refusal::LeaseLost));
        }
        for record in VERBS.map(resolved_as) {
            for status in VERBS {
                assert_eq!(finish_on(Some(&record), "holder", status, AFTER_LOCK), Err(Refusal::LeaseLost));
            }
            assert_eq!(renew_on(Some(&record), "holder", AFTER_LOCK), Err(Refusal::LeaseLost));
        }
    }

    #[test]
    fn a_renewal_never_shortens_a_lock() {
        let record = inserted(&reservation("a"));
        let shorter = Extension { lock_ttl: Some(SECOND), ..extension() };
        let renewed = renew_as_holder(&key(), &token("a"), &shorter).apply(Some(&record), START).unwrap();
        assert_eq!(renewed.locked_until, record.locked_until);
    }

    #[test]
    fn a_checkpoint_with_a_lower_number_is_ignored() {
        let save = |record: &Record, bytes: &'static str, sequence| {
            let checkpoint = Checkpoint { bytes: Bytes::from_static(bytes.as_bytes()), sequence };
            let extension = Extension { checkpoint: Some(checkpoint), ..extension() };
            renew_as_holder(&key(), &token("a"), &extension).apply(Some(record), START).unwrap()
        };
        let stored = |record: &Record| (record.checkpoint.clone().unwrap_or_default(), record.checkpoint_sequence);
        let record = save(&inserted(&reservation("a")), "two", Some(2));
        assert_eq!(stored(&record), ("two".into(), Some(2)));
        assert_eq!(stored(&save(&record, "one", Some(1))), ("two".into(), Some(2)));
        assert_eq!(stored(&save(&record, "also two", Some(2))), ("also two".into(), Some(2)));
        assert_eq!(stored(&save(&record, "unnumbered", None)), ("unnumbered".into(), Some(2)));
        assert_eq!(save(&record, "", Some(3)).checkpoint, None, "an empty one clears");
    }
}

mod resolving {
    use super::*;

    fn resolve_on(record: Option<&Record>, fence: i64, force: bool, now: Timestamp) -> Result<Step<Record>, Refusal> {
        let resolution = Finish { resolved: true, ..ending(Status::Completed) };
        resolve(fence, force, &resolution, record, now)
    }

    #[test]
    fn nothing_stored_is_not_found() {
        assert_eq!(resolve_on(None, 1, true, START), Err(Refusal::KeyNotFound));
        let finished = finished_as(Status::Completed);
        assert_eq!(resolve_on(Some(&finished), finished.fence, true, AFTER_EXPIRY), Err(Refusal::KeyNotFound));
    }

    #[test]
    fn another_fence_is_refused() {
        for record in [inserted(&hold("a")), finished_as(Status::Completed)] {
            assert_eq!(resolve_on(Some(&record), record.fence + 1, true, AFTER_LOCK), Err(Refusal::FenceMismatch));
        }
    }

    #[test]
    fn a_live_lock_yields_only_to_force() {
        let record = inserted(&hold("a"));
        assert_eq!(resolve_on(Some(&record), record.fence, false, DURING_LOCK), Err(Refusal::LockLive));
        let resolved = written(resolve_on(Some(&record), record.fence, true, DURING_LOCK), Some(&record), DURING_LOCK);
        assert!(resolved.resolved);
    }

    #[test]
    fn a_doubt_is_resolved_with_the_records_own_retention() {
        let record = inserted(&hold("a"));
        let resolved = written(resolve_on(Some(&record), record.fence, false, AFTER_LOCK), Some(&record), AFTER_LOCK);
        assert_eq!((resolved.status, resolved.resolved), (Status::Completed, true));
        assert_eq!(resolved.expires_at, Some(AFTER_LOCK.after(RETENTION)));
        assert!(matches!(answered(reserve_on(&resolved, &reservation("a"), AFTER_LOCK)), Reserved::Completed(_)));
    }

    #[test]
    fn the_same_resolution_again_is_the_record_again() {
        let record = resolved_as(Status::Completed);
        assert_eq!(answered(resolve_on(Some(&record), record.fence, false, AFTER_LOCK)), record);
    }

    #[test]
    fn what_finished_otherwise_cannot_be_resolved() {
        for record in
            [finished_as(Status::Completed), resolved_as(Status::Failed), resolved_as(Status::FailedRetryable)]
        {
            assert_eq!(resolve_on(Some(&record), record.fence, true, AFTER_LOCK), Err(Refusal::AlreadyFinished));
        }
    }
}

#[test]
fn a_takeover_keeps_the_condition_that_it_was_decided_on() {
    let record = inserted(&reservation("a"));
    let Ok(Step::Write(Write { action: Action::Reserve(condition, NextReservation { attempt, .. }), .. })) =
        reserve_on(&record, &reservation("b"), AFTER_LOCK)
    else {
        panic!("expected a new reservation")
    };
    assert_eq!((condition, attempt), (Condition::Seen(record.version), 2));
}
