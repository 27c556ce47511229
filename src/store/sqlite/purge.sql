-- Of the records that are due after ?1 and not after ?2, deletes those that expired by ?3.
DELETE FROM onceward_record
WHERE
    purge_after > ?1
    AND purge_after <= ?2
    AND expires_at <= ?3
