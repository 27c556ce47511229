-- A batch of the receipts that are older than this, after the last one that was looked at.
SELECT
    namespace,
    subject,
    value,
    created_at::text AS created_at
FROM onceward_receipt
WHERE
    created_at < clock_timestamp() - make_interval(secs => $1)
    AND (created_at, namespace, subject, value) > ($2::timestamptz, $3, $4, $5)
ORDER BY
    created_at,
    namespace,
    subject,
    value
LIMIT 500
