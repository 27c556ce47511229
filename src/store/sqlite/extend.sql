-- More time for the reservation that holds a record, and perhaps a checkpoint.
WITH given AS (
    SELECT
        ?1 AS now,
        ?2 AS id,
        ?3 AS namespace,
        ?4 AS subject,
        ?5 AS value,
        ?6 AS holder,
        ?7 AS seen,
        ?8 AS lock_ttl,
        ?9 AS on_expiry,
        ?10 AS checkpoint,
        ?11 AS checkpoint_sequence
)
UPDATE onceward_record
SET
    version = onceward_record.version + 1,
    on_expiry = max(onceward_record.on_expiry, given.on_expiry),
    locked_until = max(onceward_record.locked_until, given.now + coalesce(given.lock_ttl, onceward_record.lock_ttl)),
    expires_at = CASE
        WHEN max(onceward_record.on_expiry, given.on_expiry) = 1 /* retry */
            THEN max(onceward_record.locked_until, given.now + coalesce(given.lock_ttl, onceward_record.lock_ttl))
                + onceward_record.retention
    END,
    checkpoint = CASE
        WHEN given.checkpoint IS NULL OR given.checkpoint_sequence < onceward_record.checkpoint_sequence
            THEN onceward_record.checkpoint
        ELSE nullif(given.checkpoint, x'')
    END,
    checkpoint_sequence = CASE
        WHEN given.checkpoint IS NULL OR given.checkpoint_sequence < onceward_record.checkpoint_sequence
            THEN onceward_record.checkpoint_sequence
        ELSE coalesce(given.checkpoint_sequence, onceward_record.checkpoint_sequence)
    END
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
