-- Of the records that are due after ?1 and not after ?2, moves those that outlive ?3 to their expiry. Those that are to be
-- held are looked at again later than ?4, the clock, by ten minutes at the least.
UPDATE onceward_record
SET purge_after = coalesce(expires_at, ?4 + max(retention, 600000000))
WHERE
    purge_after > ?1
    AND purge_after <= ?2
    AND (expires_at > ?3 OR expires_at IS NULL)
