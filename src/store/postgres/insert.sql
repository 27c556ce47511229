-- A new record for each key that has none.
INSERT INTO onceward_record (
    id,
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
    expires_at,
    purge_after
)
SELECT
    u.id,
    u.namespace,
    u.subject,
    u.value,
    u.token,
    '',
    c.fence,
    c.fence,
    1,
    1 /* in progress */,
    false,
    u.on_expiry,
    u.owner,
    u.fingerprint,
    u.origin,
    u.lock_ttl,
    u.retention,
    c.now,
    c.now + u.lock_ttl * interval '1 microsecond',
    CASE WHEN u.on_expiry = 1 /* retry */ THEN c.now + (u.lock_ttl + u.retention) * interval '1 microsecond' END,
    c.now + (u.lock_ttl + u.retention) * interval '1 microsecond'
FROM
    unnest(
        $1::uuid[],
        $2::text[],
        $3::text[],
        $4::text[],
        $5::text[],
        $6::smallint[],
        $7::text[],
        $8::text[],
        $9::text[],
        $10::bigint[],
        $11::bigint[]
    ) AS u (id, namespace, subject, value, token, on_expiry, owner, fingerprint, origin, lock_ttl, retention)
    -- One clock for all times of a row. It refers to the row so that it is read for each one.
    CROSS JOIN LATERAL (
        SELECT
            now,
            (extract(epoch FROM now) * 1000000)::bigint AS fence
        FROM (SELECT clock_timestamp() AS now WHERE u.id IS NOT NULL) AS clock
    ) AS c
ON CONFLICT (id) DO NOTHING
RETURNING
    id,
    created_at AS now,
    fence,
    version,
    lock_ttl,
    locked_until,
    expires_at
