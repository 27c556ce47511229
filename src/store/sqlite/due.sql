-- How many there are of the first ?3 records that are due after ?1 and not after ?2, and when the last of them is.
SELECT
    count(*) AS met,
    max(purge_after) AS last
FROM (
    SELECT purge_after
    FROM onceward_record
    WHERE
        purge_after > ?1
        AND purge_after <= ?2
    ORDER BY purge_after
    LIMIT ?3
)
