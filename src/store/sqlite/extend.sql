-- More time for the reservation that holds a record, and perhaps a checkpoint. ?1 is the clock.
UPDATE onceward_record
SET
    version = version + 1,
    on_expiry = max(on_expiry, ?9),
    locked_until = max(locked_until, ?1 + coalesce(?8, lock_ttl)),
    expires_at = CASE WHEN max(on_expiry, ?9) = 1 THEN max(locked_until, ?1 + coalesce(?8, lock_ttl)) + retention END,
    checkpoint = CASE
        WHEN ?10 IS NULL OR ?11 < checkpoint_sequence THEN checkpoint
        ELSE nullif(?10, x'')
    END,
    checkpoint_sequence = CASE
        WHEN ?10 IS NULL OR ?11 < checkpoint_sequence THEN checkpoint_sequence
        ELSE coalesce(?11, checkpoint_sequence)
    END
WHERE
    id = ?2
    AND namespace = ?3
    AND subject = ?4
    AND value = ?5
    AND (?6 IS NULL OR (token = ?6 AND status = 1))
    AND (?7 IS NULL OR version = ?7)
RETURNING
    id,
    ?1 AS now,
    fence,
    version,
    lock_ttl,
    locked_until,
    expires_at
