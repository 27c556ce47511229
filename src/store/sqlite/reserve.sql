-- A new reservation on a record: a takeover or retry, or, at the first attempt, over an expired one. ?1 is the clock.
UPDATE onceward_record
SET
    token = ?8,
    earlier_tokens = ?16,
    fence = max(fence + 1, ?1),
    version = version + 1,
    attempt = ?15,
    status = 1,
    resolved = 0,
    on_expiry = ?9,
    owner = ?10,
    fingerprint = ?11,
    origin = ?12,
    lock_ttl = ?13,
    retention = ?14,
    created_at = CASE WHEN ?15 > 1 THEN created_at ELSE ?1 END,
    locked_until = ?1 + ?13,
    finished_at = NULL,
    expires_at = CASE WHEN ?9 = 1 THEN ?1 + ?13 + ?14 END,
    checkpoint = CASE WHEN ?15 > 1 THEN checkpoint END,
    checkpoint_sequence = NULL,
    result_code = NULL,
    result_metadata = NULL,
    result_body = NULL
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
