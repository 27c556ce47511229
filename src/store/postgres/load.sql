-- The records of these ids, and the clock from before they were read: in a statement of its own, now() is older than its
-- snapshot. A row without a record has a null in place of everything but the id and the clock.
SELECT
    u.id,
    now() AS now,
    r.namespace,
    r.subject,
    r.value,
    r.token,
    r.earlier_tokens,
    r.fence,
    r.version,
    r.attempt,
    r.status,
    r.resolved,
    r.on_expiry,
    r.owner,
    r.fingerprint,
    r.origin,
    r.lock_ttl,
    r.retention,
    r.created_at,
    r.locked_until,
    r.finished_at,
    r.expires_at,
    r.checkpoint,
    r.checkpoint_sequence,
    r.result_code,
    r.result_metadata,
    r.result_body
FROM
    unnest($1::uuid[]) AS u (id)
    LEFT JOIN LATERAL (
        SELECT
            namespace,
            subject,
            value,
            token,
            earlier_tokens,
            fence,
            version,
            attempt,
            status,
            resolved,
            on_expiry,
            owner,
            fingerprint,
            origin,
            lock_ttl,
            retention,
            created_at,
            locked_until,
            finished_at,
            expires_at,
            checkpoint,
            checkpoint_sequence,
            result_code,
            result_metadata,
            result_body
        FROM onceward_record
        WHERE id = u.id
        LIMIT 1
    ) AS r ON true
