-- More time for the reservation that holds each of these records, and perhaps a checkpoint.
UPDATE onceward_record AS r
SET
    version = r.version + 1,
    on_expiry = greatest(r.on_expiry, t.on_expiry),
    locked_until = greatest(r.locked_until, t.now + coalesce(t.lock_ttl, r.lock_ttl) * interval '1 microsecond'),
    expires_at = CASE
        WHEN greatest(r.on_expiry, t.on_expiry) = 1 /* retry */
            THEN greatest(r.locked_until, t.now + coalesce(t.lock_ttl, r.lock_ttl) * interval '1 microsecond')
                + r.retention * interval '1 microsecond'
    END,
    checkpoint = CASE
        WHEN t.checkpoint IS NULL OR t.checkpoint_sequence < r.checkpoint_sequence THEN r.checkpoint
        ELSE nullif(t.checkpoint, '')
    END,
    checkpoint_sequence = CASE
        WHEN t.checkpoint IS NULL OR t.checkpoint_sequence < r.checkpoint_sequence THEN r.checkpoint_sequence
        ELSE coalesce(t.checkpoint_sequence, r.checkpoint_sequence)
    END
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
            $7::bigint[],
            $8::smallint[],
            $9::bytea[],
            $10::bigint[]
        ) AS u (
            id,
            namespace,
            subject,
            value,
            holder,
            seen,
            lock_ttl,
            on_expiry,
            checkpoint,
            checkpoint_sequence
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
