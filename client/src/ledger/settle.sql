-- The result of the effect, in the effect's own transaction.
UPDATE onceward_receipt
SET
    result_code = $4,
    result_metadata = $5,
    result_body = $6
WHERE
    namespace = $1
    AND subject = $2
    AND value = $3
