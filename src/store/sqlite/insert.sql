-- A new record, if the key has none.
WITH given AS (
    SELECT
        ?1 AS now,
        ?2 AS id,
        ?3 AS namespace,
        ?4 AS subject,
        ?5 AS value,
        ?6 AS token,
        ?7 AS on_expiry,
        ?8 AS owner,
        ?9 AS fingerprint,
        ?10 AS origin,
        ?11 AS lock_ttl,
        ?12 AS retention
)
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
    id,
    namespace,
    subject,
    value,
    token,
    x'',
    now,
    now,
    1,
    1 /* in progress */,
    0,
    on_expiry,
    owner,
    fingerprint,
    origin,
    lock_ttl,
    retention,
    now,
    now + lock_ttl,
    CASE WHEN on_expiry = 1 /* retry */ THEN now + lock_ttl + retention END,
    now + lock_ttl + retention
FROM given
-- Without it the parser takes ON for a join.
WHERE true
ON CONFLICT (id) DO NOTHING
RETURNING
    created_at AS now,
    fence,
    version,
    lock_ttl,
    locked_until,
    expires_at
