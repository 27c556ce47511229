-- Moves those of the first ?2 due records that outlive ?1 to their expiry. ?3 is the clock.
UPDATE onceward_record
SET purge_after = coalesce(expires_at, ?3 + retention)
WHERE
    id IN (
        SELECT id
        FROM onceward_record
        WHERE purge_after <= ?1
        ORDER BY purge_after
        LIMIT ?2
    )
    AND (expires_at > ?1 OR expires_at IS NULL)
