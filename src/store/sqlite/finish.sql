-- The end of the reservation that holds a record. ?1 is the clock.
UPDATE onceward_record
SET
    version = version + 1,
    status = ?8,
    resolved = ?9,
    retention = coalesce(?10, retention),
    finished_at = ?1,
    expires_at = ?1 + coalesce(?10, retention),
    checkpoint = CASE WHEN ?11 IS NULL THEN checkpoint ELSE nullif(?11, x'') END,
    result_code = ?12,
    result_metadata = ?13,
    result_body = ?14
WHERE
    id = ?2
    AND namespace = ?3
    AND subject = ?4
    AND value = ?5
    AND (?6 IS NULL OR (token = ?6 AND status = 1))
    AND (?7 IS NULL OR version = ?7)
RETURNING
    id,
    ?1 AS now,
    fence,
    version,
    lock_ttl,
    locked_until,
    expires_at
