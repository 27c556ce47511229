-- The record of one id.
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
WHERE id = ?1
