-- First of all in a transaction, and without ON CONFLICT, so that a rival waits until this one has ended.
INSERT INTO onceward_receipt (
    namespace,
    subject,
    value,
    fingerprint,
    fence,
    outcome,
    result_code,
    result_metadata,
    result_body,
    created_at
)
VALUES (
    $1,
    $2,
    $3,
    $4,
    $5,
    $6,
    $7,
    $8,
    $9,
    clock_timestamp()
)
