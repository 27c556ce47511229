-- The end of the reservation that holds a record.
WITH given AS (
    SELECT
        ?1 AS now,
        ?2 AS id,
        ?3 AS namespace,
        ?4 AS subject,
        ?5 AS value,
        ?6 AS holder,
        ?7 AS seen,
        ?8 AS status,
        ?9 AS resolved,
        ?10 AS retention,
        ?11 AS checkpoint,
        ?12 AS result_code,
        ?13 AS result_metadata,
        ?14 AS result_body
)
UPDATE onceward_record
SET
    version = onceward_record.version + 1,
    status = given.status,
    resolved = given.resolved,
    retention = coalesce(given.retention, onceward_record.retention),
    finished_at = given.now,
    expires_at = given.now + coalesce(given.retention, onceward_record.retention),
    checkpoint = CASE
        WHEN given.checkpoint IS NULL THEN onceward_record.checkpoint
        ELSE nullif(given.checkpoint, x'')
    END,
    result_code = given.result_code,
    result_metadata = given.result_metadata,
    result_body = given.result_body
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
