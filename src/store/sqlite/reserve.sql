-- A new reservation on a record: a takeover or retry, or, at the first attempt, over an expired one.
WITH given AS (
    SELECT
        ?1 AS now,
        ?2 AS id,
        ?3 AS namespace,
        ?4 AS subject,
        ?5 AS value,
        ?6 AS holder,
        ?7 AS seen,
        ?8 AS token,
        ?9 AS on_expiry,
        ?10 AS owner,
        ?11 AS fingerprint,
        ?12 AS origin,
        ?13 AS lock_ttl,
        ?14 AS retention,
        ?15 AS attempt,
        ?16 AS earlier_tokens
)
UPDATE onceward_record
SET
    token = given.token,
    earlier_tokens = given.earlier_tokens,
    fence = max(onceward_record.fence + 1, given.now),
    version = onceward_record.version + 1,
    attempt = given.attempt,
    status = 1 /* in progress */,
    resolved = 0,
    on_expiry = given.on_expiry,
    owner = given.owner,
    fingerprint = given.fingerprint,
    origin = given.origin,
    lock_ttl = given.lock_ttl,
    retention = given.retention,
    created_at = CASE WHEN given.attempt > 1 THEN onceward_record.created_at ELSE given.now END,
    locked_until = given.now + given.lock_ttl,
    finished_at = NULL,
    expires_at = CASE WHEN given.on_expiry = 1 /* retry */ THEN given.now + given.lock_ttl + given.retention END,
    checkpoint = CASE WHEN given.attempt > 1 THEN onceward_record.checkpoint END,
    checkpoint_sequence = NULL,
    result_code = NULL,
    result_metadata = NULL,
    result_body = NULL
FROM given
WHERE
    onceward_record.id = given.id
    AND onceward_record.namespace = given.namespace
    AND onceward_record.subject = given.subject
    AND onceward_record.value = given.value
    AND (given.holder IS NULL OR (onceward_record.token = given.holder AND onceward_record.status = 1 /* in progress */))
    AND (given.seen IS NULL OR onceward_record.version = given.seen)
RETURNING
    ?1 AS now,
    fence,
    version,
    lock_ttl,
    locked_until,
    expires_at
