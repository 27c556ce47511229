-- The end of the reservation that holds a record: finish.sql for one, without the arrays, which take as long as the update
-- itself. With a single key the planner has no other way than the index.
UPDATE onceward_record AS r
SET
    version = r.version + 1,
    status = $7::smallint,
    resolved = $8::boolean,
    retention = coalesce($9::bigint, r.retention),
    finished_at = c.now,
    expires_at = c.now + coalesce($9::bigint, r.retention) * interval '1 microsecond',
    checkpoint = CASE WHEN $10::bytea IS NULL THEN r.checkpoint ELSE nullif($10::bytea, '') END,
    result_code = $11::integer,
    result_metadata = $12::text,
    result_body = $13::bytea
FROM (SELECT clock_timestamp() AS now) AS c
WHERE
    r.id = $1::uuid
    AND r.namespace = $2::text
    AND r.subject = $3::text
    AND r.value = $4::text
    AND ($5::text IS NULL OR (r.token = $5::text AND r.status = 1 /* in progress */))
    AND ($6::bigint IS NULL OR r.version = $6::bigint)
RETURNING
    r.id,
    c.now,
    r.fence,
    r.version,
    r.lock_ttl,
    r.locked_until,
    r.expires_at
