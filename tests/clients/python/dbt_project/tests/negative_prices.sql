select * from {{ ref('rows') }} where price < 0
