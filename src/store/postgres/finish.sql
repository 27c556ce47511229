-- The end of the reservation that holds each of these records.
UPDATE onceward_record AS r
SET
    version = r.version + 1,
    status = t.status,
    resolved = t.resolved,
    retention = coalesce(t.retention, r.retention),
    finished_at = t.now,
    expires_at = t.now + coalesce(t.retention, r.retention) * interval '1 microsecond',
    checkpoint = CASE WHEN t.checkpoint IS NULL THEN r.checkpoint ELSE nullif(t.checkpoint, '') END,
    result_code = t.result_code,
    result_metadata = t.result_metadata,
    result_body = t.result_body
FROM (
    SELECT
        u.*,
        found.address,
        c.now
    FROM
        unnest(
            $1::uuid[],
            $2::text[],
            $3::text[],
            $4::text[],
            $5::text[],
            $6::bigint[],
            $7::smallint[],
            $8::boolean[],
            $9::bigint[],
            $10::bytea[],
            $11::integer[],
            $12::text[],
            $13::bytea[]
        ) AS u (
            id,
            namespace,
            subject,
            value,
            holder,
            seen,
            status,
            resolved,
            retention,
            checkpoint,
            result_code,
            result_metadata,
            result_body
        )
        -- The row is found by its address, which is an index access whatever the planner believes of the table. A row that
        -- another transaction has changed meanwhile is not found by its old address: it did not take.
        CROSS JOIN LATERAL (SELECT ctid AS address FROM onceward_record WHERE id = u.id LIMIT 1) AS found
        -- One clock for all times of a row. It refers to the row so that it is read for each one.
        CROSS JOIN LATERAL (SELECT clock_timestamp() AS now WHERE u.id IS NOT NULL) AS c
) AS t
WHERE
    r.ctid = t.address
    AND r.namespace = t.namespace
    AND r.subject = t.subject
    AND r.value = t.value
    AND (t.holder IS NULL OR (r.token = t.holder AND r.status = 1 /* in progress */))
    AND (t.seen IS NULL OR r.version = t.seen)
RETURNING
    r.id,
    t.now,
    r.fence,
    r.version,
    r.lock_ttl,
    r.locked_until,
    r.expires_at
