-- A new reservation on each of these records: a takeover or retry, or, at the first attempt, over an expired one.
UPDATE onceward_record AS r
SET
    token = t.token,
    earlier_tokens = t.earlier_tokens,
    fence = greatest(r.fence + 1, (extract(epoch FROM t.now) * 1000000)::bigint),
    version = r.version + 1,
    attempt = t.attempt,
    status = 1 /* in progress */,
    resolved = false,
    on_expiry = t.on_expiry,
    owner = t.owner,
    fingerprint = t.fingerprint,
    origin = t.origin,
    lock_ttl = t.lock_ttl,
    retention = t.retention,
    created_at = CASE WHEN t.attempt > 1 THEN r.created_at ELSE t.now END,
    locked_until = t.now + t.lock_ttl * interval '1 microsecond',
    finished_at = NULL,
    expires_at = CASE WHEN t.on_expiry = 1 /* retry */ THEN t.now + (t.lock_ttl + t.retention) * interval '1 microsecond' END,
    checkpoint = CASE WHEN t.attempt > 1 THEN r.checkpoint END,
    checkpoint_sequence = NULL,
    result_code = NULL,
    result_metadata = NULL,
    result_body = NULL
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
            $7::text[],
            $8::smallint[],
            $9::text[],
            $10::text[],
            $11::text[],
            $12::bigint[],
            $13::bigint[],
            $14::integer[],
            $15::bytea[]
        ) AS u (
            id,
            namespace,
            subject,
            value,
            holder,
            seen,
            token,
            on_expiry,
            owner,
            fingerprint,
            origin,
            lock_ttl,
            retention,
            attempt,
            earlier_tokens
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
