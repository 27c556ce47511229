-- These receipts, if they are still those that were looked at.
DELETE FROM onceward_receipt AS r
USING unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS u (namespace, subject, value, created_at)
WHERE
    r.namespace = u.namespace
    AND r.subject = u.subject
    AND r.value = u.value
    AND r.created_at = u.created_at::timestamptz
