-- A batch of receipts that are older than this. Nothing changes a receipt, so none can have become younger.
DELETE FROM onceward_receipt
WHERE ctid = ANY (
    ARRAY(
        SELECT ctid
        FROM onceward_receipt
        WHERE created_at < clock_timestamp() - make_interval(secs => $1)
        ORDER BY created_at
        LIMIT 1000
        FOR UPDATE SKIP LOCKED
    )
)
