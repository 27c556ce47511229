-- Deletes the due records among the first ?2 that expired before ?1. Those that live longer are left to postpone.sql.
DELETE FROM onceward_record
WHERE
    id IN (
        SELECT id
        FROM onceward_record
        WHERE purge_after <= ?1
        ORDER BY purge_after
        LIMIT ?2
    )
    AND expires_at <= ?1
