-- The receipt of a key.
SELECT
    fingerprint,
    outcome,
    result_code,
    result_metadata,
    result_body
FROM onceward_receipt
WHERE
    namespace = $1
    AND subject = $2
    AND value = $3
