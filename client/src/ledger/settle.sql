-- The result of the effect, in the effect's own transaction: the receipt is the very one that this transaction has
-- inserted, and not a rival's that came after somebody had ended the transaction underneath.
UPDATE onceward_receipt
SET
    result_code = $4,
    result_metadata = $5,
    result_body = $6,
    created_at = clock_timestamp()
WHERE
    namespace = $1
    AND subject = $2
    AND value = $3
    AND fence = $7
    AND xmin::text::bigint = (pg_current_xact_id()::text::bigint & 4294967295)
