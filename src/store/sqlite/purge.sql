-- Deletes up to ?2 due records that expired by ?1.
DELETE FROM onceward_record
WHERE
    id IN (
        SELECT id
        FROM onceward_record
        WHERE
            purge_after <= ?1
            AND expires_at <= ?1
        ORDER BY purge_after
        LIMIT ?2
    )
